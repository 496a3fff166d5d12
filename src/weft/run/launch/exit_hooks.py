"""Hooks that run when a script ends, such as the one that closes a session which nobody has closed."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

ExitHook = Callable[[BaseException | None], None]
"""Takes the error that ended the script; None: the script came to its end."""

_HOOKS: ContextVar[tuple[ExitHook, ...]] = ContextVar("_HOOKS", default=())


def add_exit_hook(hook: ExitHook) -> Callable[[], None]:
    """Have `hook` called once, when the script ends: by Weft's launcher, which reports what it raises, else by Python.

    Returns a function that removes the hook.
    """

    def call() -> None:
        _call_at_python_exit(hook)

    def remove() -> None:
        atexit.unregister(call)
        _HOOKS.set(tuple(other for other in _HOOKS.get() if other != hook))

    # Both ways: Weft's launcher runs the hooks before it writes the rank's result, so that it can report their errors;
    # in other processes Python's own exit is the only end.  The hook of a session takes itself off when it has run.
    atexit.register(call)
    _HOOKS.set((*_HOOKS.get(), hook))
    return remove


def run_exit_hooks(error: BaseException | None) -> None:
    """Do what waits for the end of a rank's script, the last first."""
    for hook in reversed(_HOOKS.get()):
        hook(error)


def _call_at_python_exit(hook: ExitHook) -> None:
    error = _unhandled()
    try:
        hook(error)
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
