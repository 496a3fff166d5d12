"""Collectives by our own algorithms: any schedule of `weft.comm.algorithms`, carried by non-blocking messages of a
group.

    messenger = Messenger(mesh["data"])
    messenger.run(gradient, "all_reduce", "ring")
    wait = messenger.start(gradient, "all_reduce", "halving_doubling", op=dist.ReduceOp.AVG)
    ...
    wait()

Works on CPU tensors over Gloo, also over that which lies beside the shared memory of a group of `weft`.  Reductions are
made in the tensor's own type, in the order of the schedule, which is the same on all ranks: every rank gets the same
bits.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._collective_steps import CollectiveSteps, Combine, combiner, prepare
from weft.comm._execute import Channel, PreparedCollective, execute
from weft.comm._failure_table import FailureTable
from weft.comm._node import NodeMemory
from weft.comm.algorithms import Arrangement, build_schedule
from weft.comm.device import group_store
from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait, nothing_to_wait_for
from weft.comm.shared_memory import shared_memory_group
from weft.comm.trace_event import TraceEvent, num_bytes
from weft.comm.watched_group import messages_group, watch_of
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.config.cluster import Collective

_PIPELINE_BYTES = 128 << 10
"""Bytes of a tensor by which the number of its pieces grows: P pieces through a tree of height H take about (P +
2H)(α + Sβ/2P), least at P = √(HSβ/α), and Gloo's α/β is 280 kB between processes of one machine."""
_MOST_PIECES = 64
_KEPT_PROGRAMS = 256
_POLL_SECONDS = 0.1
"""Time between two looks at whether another rank has given up."""
_AWAKE_SECONDS = 1.0
"""Time that the thread goes on looking after the last collective that a caller ran itself: waking it costs a switch."""


@dataclass(slots=True)
class _Job:
    """One collective, from the call to its end."""

    task: PreparedCollective
    seen: TraceEvent | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@dataclass(slots=True)
class _Queue:
    """What the messenger and its thread share.  The thread must not hold the messenger, which then never ends."""

    channel: Channel
    jobs: queue.SimpleQueue[_Job | Literal["wake"] | None] = field(default_factory=queue.SimpleQueue)
    """The jobs for the thread, in order; None ends the thread."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """The lock of whoever runs a collective: the thread, or the caller if nothing else is under way."""
    began: float | None = None
    """Monotonic second at which a caller began to run a collective itself; None: no caller does."""
    ended: float = 0.0
    """Monotonic second at which the last caller's own collective ended."""
    is_asleep: bool = False
    """Whether the thread only waits for jobs, and does not watch a caller's collective."""

    def perform(self, job: _Job) -> None:
        """Run a job and keep its error for whoever waits."""
        with self.turn:
            try:
                execute(job.task, self.channel)
            except BaseException as error:  # whoever waits gets it
                job.error = error
        if job.seen is not None:
            job.seen.done()
        job.done.set()

    def perform_here(self, job: _Job) -> None:
        """Run a job in the caller's thread, which saves two changes of threads; the other one looks for alarms."""
        self.began = time.monotonic()
        entered = 0 if job.seen is None else job.seen.enter_wait()
        # Inside of Gloo's wait nobody sees that another rank has given up, so the thread must look meanwhile.
        if self.is_asleep:
            self.jobs.put("wake")
        try:
            self.perform(job)
        finally:
            self.began, self.ended = None, time.monotonic()
            if job.seen is not None:
                job.seen.exit_wait(entered)

    def look(self) -> None:
        """Stop a collective that waits for a rank if another rank has given up, which a waiting thread cannot see."""
        if self.channel.failures.has_alarm():
            self.channel.close()


class CollectiveOptions(TypedDict, total=False):
    """Optional arguments of a call; all ranks must give the same."""

    op: dist.ReduceOp.RedOpType
    """Operation of all_reduce and reduce_scatter; by default SUM."""
    root: int
    """Rank within the group that broadcasts; by default 0."""
    regions: Sequence[tuple[int, int]] | None
    """[start, stop) of each rank in the flattened tensor, side by side and covering it, for collectives that have them;
    by default near-equal ones, the longer first."""
    arrangement: Arrangement | None
    """Arrangement of the ranks on the links (`weft.comm.algorithms.arrange`); by default their order, in one node."""
    pieces: int | None
    """Number of pieces of pipelined algorithms; by default √(bytes / 128 KiB), at most 64."""
    servers: int
    """Number of servers of parameter_server; by default 1."""
    timeout_seconds: float
    """Timeout from the moment at which it is this collective's turn; by default the messenger's."""


class Messenger:
    """Runs collectives over one group, one after another: blocking ones where they are called, others in a thread.

    Build it on every member of the group and call it there alike and in the same order; at most one messenger per
    group. Close it (or use it as a context manager) before the group is destroyed; a forgotten one ends when it is
    collected.

    After a `CollectiveError` about missing ranks the connections of the group are closed: build a new group.
    """

    def __init__(
        self,
        view: GroupView,
        *,
        timeout_seconds: float | None = None,
        store: dist.Store | None = None,
        node: NodeMemory | None = None,
    ) -> None:
        """`timeout_seconds` is the default of all calls; by default the group's.  `store` is where ranks report what
        went wrong; by default the one of the default group.  `node` carries what algorithms in levels do inside this
        rank's host; close it after the messenger."""
        self.view = view
        self._timeout_seconds = _positive(view.timeout_seconds if timeout_seconds is None else timeout_seconds)
        self._prepare = lru_cache(_KEPT_PROGRAMS)(partial(_prepare, view, node))  # without this object: no circle
        self._num_jobs = 0
        self.num_messages = 0
        """Messages that this rank was told to send to others until now."""
        self._last: _Job | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: Callable[[], object] = nothing_to_wait_for
        if view.group is None:
            return
        failures = FailureTable(store or group_store(), f"weft/messages/{view.group.group_name}", view.size)
        group, shared = messages_group(view.group), shared_memory_group(view.group)
        self._queue = _Queue(Channel(group, view.ranks, view.index, failures, node, shared))
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name="weft-messages", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._queue.jobs.put, None)

    def __enter__(self) -> Messenger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread once it has done what was started.  Further calls are errors; closing again does nothing."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def run(
        self, tensor: Tensor, collective: Collective, algorithm: str, **options: Unpack[CollectiveOptions]
    ) -> Tensor:
        """Do a collective in place and return the tensor; see `start`."""
        job = self._job(tensor, collective, algorithm, options)
        if job is None:
            return tensor
        # In the caller's thread where nothing is under way; behind a started collective it must wait for its turn, or
        # messages of the two would be taken for one another's.
        if self._last is None or self._last.done.is_set():
            self._queue.perform_here(job)
        else:
            self._enqueue(job)
        _Waiting(job, self._queue)()
        return tensor

    def start(
        self, tensor: Tensor, collective: Collective, algorithm: str, **options: Unpack[CollectiveOptions]
    ) -> Wait:
        """Begin a collective in place.  Call on every rank of the group, in one order; several may be under way.

        Args:
            tensor: contiguous, on the CPU, as long on every rank.  Do not touch it before the wait returns.
            collective: all_reduce and broadcast work on all of it.  reduce_scatter leaves the sum in this rank's region
                and anything in the others'; all_gather fills the others' regions; all_to_all sends region j to rank j,
                and ends with rank j's in region j: there all regions must be equally long.
            algorithm: a name that `weft.comm.algorithms.ALGORITHMS` knows, or `hierarchical+X`.
            options: see `CollectiveOptions`.

        Raises:
            CollectiveError: here, when the call makes no sense; in the wait, when ranks are missing at the deadline or
                lost their connection.  It names them.
        """
        job = self._job(tensor, collective, algorithm, options)
        if job is None:
            return nothing_to_wait_for
        self._enqueue(job)
        return _Waiting(job, self._queue)

    def _enqueue(self, job: _Job) -> None:
        self._last = job
        self._queue.jobs.put(job)

    def _job(self, tensor: Tensor, collective: Collective, algorithm: str, options: CollectiveOptions) -> _Job | None:
        """Return the checked job of a call; None: the group has one rank, and there is nothing to do."""
        flat = _flattened(tensor)
        timeout = _positive(options.get("timeout_seconds", self._timeout_seconds))
        prepared, combine = self._prepared(flat, collective, algorithm, options)
        if self.view.group is None:
            return None
        if self._thread is None:
            raise CollectiveError(f"{collective} on a messenger that is closed. Build a new one for the group.")
        self._num_jobs += 1
        self.num_messages += prepared.num_messages
        title = f"{collective} of {flat.numel() * flat.element_size():,} bytes by {algorithm}"
        watch = watch_of(self.view.group)
        seen = None if watch is None else watch.launch(collective, num_bytes(flat))
        return _Job(PreparedCollective(prepared, flat, combine, title, _tag(self._num_jobs), timeout), seen)

    def _prepared(
        self, flat: Tensor, collective: Collective, algorithm: str, options: CollectiveOptions
    ) -> tuple[CollectiveSteps, Combine | None]:
        """Return the steps of a call, from the cache where the same call was made before."""
        # A training repeats the same few calls in every step; building a schedule in Python takes longer than many of
        # these collectives themselves.
        pieces, regions = options.get("pieces"), options.get("regions")
        return self._prepare(
            flat.numel(),
            flat.dtype,
            collective,
            algorithm,
            op=options.get("op", dist.ReduceOp.SUM),
            arrangement=options.get("arrangement"),
            root=options.get("root", 0),
            pieces=_pieces(flat.numel() * flat.element_size()) if pieces is None else pieces,
            servers=options.get("servers", 1),
            regions=None if regions is None else tuple(regions),
        )


def _prepare(
    view: GroupView,
    node: NodeMemory | None,
    length: int,
    dtype: torch.dtype,
    collective: Collective,
    algorithm: str,
    *,
    op: dist.ReduceOp.RedOpType,
    arrangement: Arrangement | None,
    root: int,
    pieces: int,
    servers: int,
    regions: tuple[tuple[int, int], ...] | None,
) -> tuple[CollectiveSteps, Combine | None]:
    """Return this rank's steps, by messages and, where the node's memory carries the collective, over that memory."""
    combine = combiner(op, dtype) if collective in ("all_reduce", "reduce_scatter") else None
    moves = build_schedule(
        algorithm,
        collective,
        view.index,
        view.size,
        arrangement=arrangement,
        root=root,
        pieces=pieces,
        servers=servers,
        shares_node=node is not None and node.carries(arrangement, dtype, combine),
    )
    if regions is not None:
        _check_regions(regions, length, view.size, collective)
    bounds = moves.bounds(length) if regions is None else moves.bounds_of_regions(regions)
    # In place: what leaves region j makes room for what comes from rank j, so both must be as long.
    if collective == "all_to_all" and len({stop - start for start, stop in _edges(bounds, view.size)}) > 1:
        raise CollectiveError(
            f"all_to_all in place needs regions of one size: {length} elements do not divide by {view.size} ranks. "
            f"Pad the tensor to {-(-length // view.size) * view.size}."
        )
    return prepare(moves, bounds, dtype.itemsize), combine


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The wait of one job."""

    job: _Job
    shared: _Queue

    def __call__(self) -> None:
        seen = self.job.seen
        entered = 0 if seen is None else seen.enter_wait()
        while not self.job.done.wait(_POLL_SECONDS):
            self.shared.look()
        if seen is not None:
            seen.exit_wait(entered)
        if self.job.error is not None:
            raise self.job.error


def _serve(shared: _Queue) -> None:
    """Body of the thread: one job after another until None comes; between them it looks after the caller's."""
    while True:
        shared.is_asleep = True
        if shared.began is not None or time.monotonic() - shared.ended < _AWAKE_SECONDS:
            shared.is_asleep = False
        try:
            job = shared.jobs.get(timeout=None if shared.is_asleep else _POLL_SECONDS)
        except queue.Empty:
            if (began := shared.began) is not None and time.monotonic() - began > _POLL_SECONDS:
                shared.look()
            continue
        finally:
            shared.is_asleep = False
        if job is None:
            return
        if job != "wake":
            shared.perform(job)
        del job


def _flattened(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        kind = f"on {tensor.device}" if tensor.device.type != "cpu" else "not contiguous"
        raise CollectiveError(
            f"a tensor of shape {list(tensor.shape)} is {kind}: collectives by messages work in place on contiguous "
            "CPU tensors. Accelerators have their own library; call .contiguous() on others."
        )
    return tensor.detach().view(-1)


def _check_regions(regions: Sequence[tuple[int, int]], length: int, members: int, collective: Collective) -> None:
    if collective in ("all_reduce", "broadcast"):
        raise CollectiveError(f"{collective} works on the whole tensor: leave regions out.")
    edges = [0, *(stop for _, stop in regions)]
    if len(regions) != members or [start for start, _ in regions] != edges[:-1] or edges[-1] != length:
        raise CollectiveError(
            f"regions = {list(regions)} must stand side by side, one for each of {members} ranks, and cover all "
            f"{length} elements."
        )
    if edges != sorted(edges):
        raise CollectiveError(f"regions = {list(regions)} must not stop before they start.")


def _edges(bounds: tuple[int, ...], members: int) -> list[tuple[int, int]]:
    parts = (len(bounds) - 1) // members
    return [(bounds[rank * parts], bounds[(rank + 1) * parts]) for rank in range(members)]


def _pieces(size_bytes: int) -> int:
    return min(_MOST_PIECES, max(1, round(math.sqrt(size_bytes / _PIPELINE_BYTES))))


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise CollectiveError(f"timeout_seconds = {seconds:g}: use more than 0.")
    return seconds


def _tag(number: int) -> int:
    """Return the tag of one collective's messages, far from the small tags of other senders over the group."""
    return (1 << 30) + number % (1 << 20)
