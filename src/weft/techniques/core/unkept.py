"""Code whose results selective recomputation keeps none of, because it keeps what its backward needs by itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_is_unkept: ContextVar[bool] = ContextVar("weft_unkept", default=False)


@contextmanager
def unkept() -> Generator[None]:
    """Let nothing be kept of what runs inside, in the forward and when it is run again."""
    token = _is_unkept.set(True)
    try:
        yield
    finally:
        _is_unkept.reset(token)


def is_unkept() -> bool:
    """Whether this thread is inside of `unkept`."""
    return _is_unkept.get()
