"""Collectives in torch's profilers, as Gloo shows its own: `weft:all_reduce` with shapes, from launch to end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # pyright: ignore[reportPrivateUsage]  # torch has no public one
from torch.futures import Future

from weft.comm.shared_memory._future import ending

is_profiling = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage]  # torch has no public one
"""Whether a profiler runs in this thread: 0.1 µs."""


class Record:
    """What the profiler is told of one collective, from now on.  It is told of the end on another thread than the one
    that launched: what ends on its own is taken for a part of what the thread computed."""

    def __init__(self, title: str, tensors: object) -> None:
        """`tensors` are what this rank gives: one, or lists of them."""
        self._function = _RecordFunctionFast(f"weft:{title}", list(_flat(tensors)))
        self._telling = threading.Lock()
        self._has_told = False
        self._told: Future[Any] = Future()
        self._function.__enter__()
        self._ended = ending(self._told)

    def tell(self) -> None:
        """It is over.  By any thread; the first counts."""
        with self._telling:
            if self._has_told:
                return
            self._has_told = True
        self._told.set_result(lambda: self._function.__exit__(None, None, None))

    def end(self) -> None:
        """It is over, and when this returns the profiler knows."""
        self.tell()
        self._ended.wait()


def _flat(tensors: object) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for part in cast("list[object]", tensors):
            yield from _flat(part)
