"""Gloo as a process group in Python, so that every collective passes one place where it can be seen.

torch lets Python subclass `ProcessGroup`, not `Backend`.  Two conditions make such a group work everywhere (DDP, FSDP2,
DTensor, DeviceMesh, functional collectives): it holds a real backend, which gives it a name; and what C++ calls by
virtual methods has the same names as in `torch/csrc/distributed/c10d/PyProcessGroup.hpp`, those of torch 2.13 and the
older ones of 2.11.  Collectives go on to a plain group over the same backend: to call a virtual method of one's own
base class would lead back here.
"""

# torch's stubs overload these methods by what Python may pass.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.comm.trace_event import Operation, TraceEvent, num_bytes
from weft.comm.untraced import untraced
from weft.comm.watch import Watch, WatchedWork

WATCHED_GLOO = "weft_gloo"
"""The backend's name."""
_CPU = torch.device("cpu")
_BREAKING_TAG = (1 << 31) - 7
"""Tag of messages that nobody sends: see `close_connections`."""
_TINY = timedelta(milliseconds=1)


class GroupMethod(NamedTuple):
    """A method of a process group, as watches and profilers describe it."""

    operation: Operation
    whole: int | None
    """Index of the argument that is the full tensor on every rank; None: there is none."""
    title: str
    """Name in profilers, as Gloo has it."""
    given: int | None
    """Index of the argument with this rank's input; None: there is none."""


METHODS: Mapping[str, GroupMethod] = {
    "allreduce": GroupMethod("all_reduce", 0, "all_reduce", 0),
    "allreduce_coalesced": GroupMethod("all_reduce", 0, "all_reduce", 0),
    "reduce": GroupMethod("reduce", 0, "reduce", 0),
    "broadcast": GroupMethod("broadcast", 0, "broadcast", 0),
    "reduce_scatter": GroupMethod("reduce_scatter", 1, "reduce_scatter", 1),
    "reduce_scatter_single": GroupMethod("reduce_scatter", 1, "reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": GroupMethod("reduce_scatter", 1, "reduce_scatter_tensor", 1),
    "allgather": GroupMethod("all_gather", 0, "all_gather", 1),
    "allgather_coalesced": GroupMethod("all_gather", 0, "all_gather", 1),
    "all_gather_single": GroupMethod("all_gather", 0, "all_gather_into_tensor", 1),
    "all_gather_single_coalesced": GroupMethod("all_gather", 0, "all_gather_into_tensor", 1),
    "alltoall": GroupMethod("all_to_all", 1, "all_to_all", 1),
    "all_to_all_single": GroupMethod("all_to_all", 1, "all_to_all", 1),
    "gather": GroupMethod("gather", 1, "gather", 1),
    "scatter": GroupMethod("scatter", 0, "scatter", 1),
    "send": GroupMethod("send", 0, "send", 0),
    "recv": GroupMethod("receive", 0, "recv", 0),
    "recv_anysource": GroupMethod("receive", 0, "recvAnySource", 0),
    "barrier": GroupMethod("barrier", None, "barrier", None),
}
"""Methods of a process group that move tensors, by their names in torch 2.13."""
OLDER_NAMES: Mapping[str, str] = {
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
"""Names in torch 2.11 and 2.12."""


def _passing_on(kind: type[WatchedGroup]) -> type[WatchedGroup]:
    """Give a class every method of `METHODS`, under all of its names: the plain group's, watched."""

    def passed_on(name: str, about: GroupMethod) -> Callable[..., dist.Work]:
        def method(self: WatchedGroup, *args: Any, **options: Any) -> dist.Work:
            seen = self.launch(about, None if about.whole is None else args[about.whole])
            work: dist.Work = getattr(self.plain, name)(*args, **options)
            return work if seen is None else WatchedWork(work, seen)

        method.__name__ = name
        return method

    for name in (*METHODS, *OLDER_NAMES):
        setattr(kind, name, passed_on(name, METHODS[OLDER_NAMES.get(name, name)]))
    return kind


@untraced
@_passing_on
class WatchedGroup(dist.ProcessGroup):
    """A group over Gloo.  With a `watch` everything that it carries is seen; without one it only passes on."""

    watch: Watch | None = None
    shares_memory = False
    """Whether something else than Gloo carries it: see `shared_memory_group`."""

    def __init__(self, gloo: dist.ProcessGroupGloo, *, rank: int, num_ranks: int) -> None:
        # The stub knows only the form with a store, which leaves the object without what Python needs of it.
        super().__init__(rank, num_ranks)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.plain = dist.ProcessGroup(rank, num_ranks)  # pyright: ignore[reportCallIssue, reportArgumentType]
        """The backend's own process group, without this class around it."""
        self.held: set[object] = set()
        """Waits that must live until their operations have ended; see `hold`."""
        for group in (self, self.plain):
            group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def abort(self) -> None:
        """End what waits in this group, here and on the ranks that wait for this one; it is of no use afterwards.  By
        any thread."""
        close_connections(self.plain)
        super().abort()

    def launch(self, method: GroupMethod, tensors: object) -> TraceEvent | None:
        """Note that a method is called on `tensors`; None where nobody watches, or it is a part of what was seen."""
        watch = self.watch
        return None if watch is None else watch.launch(method.operation, num_bytes(tensors), by_torch=True)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close all connections of a group over Gloo, so that every rank that waits for this one stops waiting.

    Gloo has one way to do so: a wait that times out closes them, and wakes all other waits of the process, too.
    """
    # A receive that no rank will ever match, with a timeout of a millisecond.
    never = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            work = group.recv([never], peer, _BREAKING_TAG)
        except RuntimeError:  # closed already: try the next one
            continue
        with suppress(RuntimeError):
            work.wait(_TINY)
        return


def messages_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return what sends messages between CPU tensors by Gloo: the group inside, which one over shared memory has, too;
    any other is its own.  Nobody sees what passes.  Torch does not know it by name: call its methods, with ranks of the
    group."""
    return group.plain if isinstance(group, WatchedGroup) else group


def gloo_backend(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return Gloo between ranks that meet at `store`.  Call on each of them."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, num_ranks, timeout)
    gloo._set_sequence_number_for_group()
    return gloo


def register_watched_backend() -> None:
    """Let `new_group(backend="weft_gloo")` work in this process.  No collective; twice is as good as once."""
    if WATCHED_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(WATCHED_GLOO, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> WatchedGroup:
    """Create the group; torch calls this on every rank of a new group."""
    rank, num_ranks = options.group_rank, options.group_size
    return WatchedGroup(gloo_backend(options.store, rank, num_ranks, options.timeout), rank=rank, num_ranks=num_ranks)


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """Return the watch of a group; None: nobody watches it, or it cannot be watched."""
    return group.watch if isinstance(group, WatchedGroup) else None


@dataclass(slots=True, eq=False)
class _Held:
    wait: Callable[[], None]
    among: set[object]

    def __call__(self) -> None:
        self.wait()
        self.among.discard(self)


def hold(group: dist.ProcessGroup | None, wait: Callable[[], None]) -> Callable[[], None]:
    """Return a wait that lives until it has been waited for, or as long as its group.

    Gloo forgets a receive that nobody holds, and gives its message to the next one.
    """
    if not isinstance(group, WatchedGroup):
        return wait
    work = _Held(wait, group.held)
    group.held.add(work)
    return work
