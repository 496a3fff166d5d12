"""Collectives in torch's profilers, as Gloo shows its own: `weft:all_reduce` with shapes, from launch to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # pyright: ignore[reportPrivateUsage]  # torch has no public one
from torch.futures import Future

from weft.comm._untraced import untraced
from weft.comm.shared_memory._future import ending

T = TypeVar("T", bound=type[Any])

_TITLES: Mapping[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_regions": ("reduce_scatter", 0),
    "all_gather_regions": ("all_gather", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
    "barrier": ("barrier", None),
}
"""Methods of a group: as the profiler names them, after Gloo, and which argument holds what this rank gives."""
_MESSAGES = ("send", "recv", "recv_anysource")


def recorded(kind: T) -> T:
    """Let a group's methods be seen by the profiler where one runs; where none does, a call costs 0.1 µs more."""
    for name in _TITLES:
        method = vars(kind)[name]
        seen = _seen_by_profiler(name, method)
        for other, found in list(vars(kind).items()):  # some have two names
            if found is method:
                setattr(kind, other, seen)
    return kind


def _seen_by_profiler(name: str, method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    is_enabled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage]  # torch has no public one
    title, given = _TITLES[name]

    @wraps(method)
    def launch(self: Any, *args: Any, **options: Any) -> dist.Work:
        if not is_enabled():
            return method(self, *args, **options)
        tensors = [] if given is None or given >= len(args) else list(_flat(args[given]))
        record = Record(f"weft:{title}", tensors)
        try:
            work = method(self, *args, **options)
        except BaseException:
            record.end()
            raise
        if name not in _MESSAGES:  # which end in any order: a thread that waited for one would hold up the others
            cast("Future[Any]", work.get_future()).add_done_callback(lambda _: record.tell())
        if work.is_completed():
            record.end()
        return RecordedWork(work, record)

    return launch


def _flat(tensors: object) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for part in cast("list[object]", tensors):
            yield from _flat(part)


class Record:
    """What the profiler is told of one collective, from now on.  It is told of the end on another thread than the one
    that launched: what ends on its own is taken for a part of what the thread computed."""

    def __init__(self, name: str, tensors: list[Tensor]) -> None:
        self._function = _RecordFunctionFast(name, tensors)
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


@untraced
class RecordedWork(dist.Work):
    """Another work, of whose end a profiler is told."""

    def __init__(self, work: dist.Work, record: Record) -> None:
        super().__init__()
        self._work = work
        self._record = record

    def __del__(self) -> None:
        self._record.tell()  # of what nobody has waited for

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        finally:
            self._record.end()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:  # `dist.recv` asks for it by this name
        return self._work._source_rank()

    def get_future(self) -> Future[Any]:
        return cast("Future[Any]", self._work.get_future())
