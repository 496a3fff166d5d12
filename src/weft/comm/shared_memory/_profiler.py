"""Collectives in torch's profilers: `weft:all_reduce` with shapes while one is launched, as Gloo has it, and
`weft:wait(all_reduce)` while somebody waits for its end.

Gloo's own records last until the collective has ended.  One that ends after its profiler was stopped writes into memory
that torch has given back: ranks that profiled a few steps with reductions under way crashed when the trace was written
(torch 2.13, 2026-11).  So no record of the profiled thread stays open longer than the call that opened it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # pyright: ignore[reportPrivateUsage]  # torch has no public one
from torch.futures import Future

from weft.comm.shared_memory._future import ending

is_profiling = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage]  # torch has no public one
"""Whether a profiler runs in this thread: 0.1 µs."""


@contextmanager
def launching(title: str, tensors: object) -> Generator[None]:
    """Show the launch of a collective.  `tensors` are what this rank gives: one, or lists of them.

    Its end is told on another thread, which this one waits for: torch takes what ends on its own thread for a part of
    what that has computed, and calls the other kind asynchronous.
    """
    function, told = _RecordFunctionFast(f"weft:{title}", list(_flat(tensors))), Future[Any]()
    function.__enter__()
    ended = ending(told)
    try:
        yield
    finally:
        told.set_result(lambda: function.__exit__(None, None, None))
        ended.wait()


def waiting(title: str) -> _RecordFunctionFast:
    """Show a wait for a collective's end, within `with`."""
    return _RecordFunctionFast(f"weft:wait({title})")


def _flat(tensors: object) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for part in cast("list[object]", tensors):
            yield from _flat(part)
