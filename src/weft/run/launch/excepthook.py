"""Installs `sys.excepthook`, so that the error which ends a script is easy to find.

Once this module is imported, an error of Weft that ends the process is printed as its text and the user's line,
without Weft's own calls.  Other errors are printed as before.  Under torchrun both are also written into the agent's
error file; otherwise its report would have the exit status alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType

from weft.errors import CollectiveError, WeftError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_to_torchrun(text: str, *, follows: bool = False) -> None:
    """Write the error that ended this process into the error file of torchrun's agent, if the agent started it.

    An error that `follows` from one of another rank is dated a second later: the agent counts whole seconds, and
    reports the earliest error.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
    with suppress(OSError), open(path, "w", encoding="utf-8") as stream:
        json.dump({"message": {"message": text, "extraInfo": extra}}, stream)


def _say(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, WeftError):
        text = "\n".join([f"{kind.__name__}: {error}", *error.lines_of_user()])
        print(text, file=sys.stderr)
    else:
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        before(kind, error, trace)
    report_to_torchrun(text, follows=isinstance(error, CollectiveError))


sys.excepthook = partial(_say, sys.excepthook)
