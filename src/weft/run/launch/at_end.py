"""What is done when a script ends whose session nobody has closed, and what it ended by."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

Leave = Callable[[BaseException | None], None]
"""Is told the error that the script ended by; None: it came to its end."""

_OPEN: ContextVar[tuple[Leave, ...]] = ContextVar("_OPEN", default=())


def at_end(leave: Leave) -> Callable[[], None]:
    """Have `leave` called once, when the script ends: by Weft's launcher, which reports what it raises, else by Python.

    Returns what takes that back.
    """

    def call() -> None:
        _leave_python(leave)

    def take_back() -> None:
        atexit.unregister(call)
        _OPEN.set(tuple(each for each in _OPEN.get() if each != leave))

    atexit.register(call)
    _OPEN.set((*_OPEN.get(), leave))
    return take_back


def end_script(error: BaseException | None) -> None:
    """Do what waits for the end of a rank's script, the last first."""
    for leave in reversed(_OPEN.get()):
        leave(error)


def _leave_python(leave: Leave) -> None:
    error = _unhandled()
    try:
        leave(error)
    except BaseException as problem:  # whatever it is: Python goes on to its end, and would end well
        if problem is not error:
            sys.excepthook(type(problem), problem, problem.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _unhandled() -> BaseException | None:
    """The error that ends this process; a prompt keeps one that has ended nothing."""
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
