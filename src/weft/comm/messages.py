"""Collectives by our own algorithms: any schedule of `weft.collective`, carried by non-blocking messages of a group.

    messenger = Messenger(mesh["data"])
    messenger.run(gradient, "all_reduce", "ring")
    wait = messenger.start(gradient, "all_reduce", "halving_doubling", op=dist.ReduceOp.AVG)
    ...
    wait()

Works on CPU tensors over a backend that sends them (Gloo).  Reductions are made in the tensor's own type, in the order
of the schedule, which is the same on all ranks: every rank gets the same bits.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from weft.cluster import Collective
from weft.collective import Arrangement, build_schedule
from weft.comm._device import group_store
from weft.comm._execute import GivenUp, Wire, execute, give_up
from weft.comm._mesh import GroupView
from weft.comm._program import Program, combiner, prepare
from weft.comm._reduce import Wait, nothing_to_wait_for
from weft.comm._trouble import Board
from weft.errors import CollectiveError

PIECE_BYTES = 256 << 10
"""Of what follows one another through a pipelined tree or chain, unless the caller says how many pieces."""
MOST_PIECES = 64
_KEPT_PROGRAMS = 256
_POLL_SECONDS = 0.1
"""Between two looks at whether another rank has given up."""


@dataclass(slots=True)
class _Job:
    """One collective, from the call to its end."""

    program: Program
    flat: Tensor
    op: dist.ReduceOp.RedOpType
    title: str
    deadline_seconds: float
    tag: int
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Messenger:
    """Runs collectives over one group, one after another, in a thread of its own.

    Build it on every member of the group and call it there alike and in the same order; at most one messenger per
    group. Close it (or use it as a context manager) before the group is destroyed; a forgotten one ends when it is
    collected.

    After a `CollectiveError` about missing ranks the connections of the group are closed: build a new group.
    """

    def __init__(self, view: GroupView, *, deadline_seconds: float = 600.0, store: dist.Store | None = None) -> None:
        """`deadline_seconds` is the default of all calls.  `store` is where ranks report what went wrong; by default
        the one of the default group."""
        self.view = view
        self._deadline_seconds = _positive(deadline_seconds)
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._num_jobs = 0
        self._given_up = GivenUp()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer: Callable[[], object] = nothing_to_wait_for
        if view.group is None:
            return
        board = Board(store or group_store(), f"weft/messages/{view.group.group_name}", view.size)
        self._wire = Wire(view.group, view.ranks, view.index, board)
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self._wire, self._given_up), name="weft-messages", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._jobs.put, None)

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
        self,
        tensor: Tensor,
        collective: Collective,
        algorithm: str,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        root: int = 0,
        regions: Sequence[tuple[int, int]] | None = None,
        arrangement: Arrangement | None = None,
        pieces: int | None = None,
        servers: int = 1,
        deadline_seconds: float | None = None,
    ) -> Tensor:
        """Do a collective in place and return the tensor; see `start`."""
        self.start(
            tensor, collective, algorithm, op=op, root=root, regions=regions, arrangement=arrangement, pieces=pieces,
            servers=servers, deadline_seconds=deadline_seconds,
        )()  # fmt: skip
        return tensor

    def start(
        self,
        tensor: Tensor,
        collective: Collective,
        algorithm: str,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        root: int = 0,
        regions: Sequence[tuple[int, int]] | None = None,
        arrangement: Arrangement | None = None,
        pieces: int | None = None,
        servers: int = 1,
        deadline_seconds: float | None = None,
    ) -> Wait:
        """Begin a collective in place.  Call on every rank of the group, in one order; several may be under way.

        Args:
            tensor: contiguous, on the CPU, as long on every rank.  Do not touch it before the wait returns.
            collective: all_reduce and broadcast work on all of it.  reduce_scatter leaves the sum in this rank's region
                and anything in the others'; all_gather fills the others' regions; all_to_all sends region j to rank j,
                and ends with rank j's in region j: there all regions must be equally long.
            algorithm: a name that `weft.collective.ALGORITHMS` knows, or `hierarchical+X`.
            op: of all_reduce and reduce_scatter.
            root: rank within the group that broadcasts.
            regions: [start, stop) of each rank in the flattened tensor, side by side and covering it, for collectives
                that have them; by default near-equal ones, the longer first.
            arrangement: how the ranks lie on the links (`weft.collective.arrange`).
            pieces: of pipelined algorithms; by default one per 256 KiB, at most 64.
            servers: of parameter_server.
            deadline_seconds: from the moment at which it is this collective's turn.

        Raises:
            CollectiveError: here, when the call makes no sense; in the wait, when ranks are missing at the deadline or
                lost their connection.  It names them.
        """
        flat = _flattened(tensor)
        combiner(op, flat.dtype) if collective in ("all_reduce", "reduce_scatter") else None
        limit = self._deadline_seconds if deadline_seconds is None else _positive(deadline_seconds)
        size_bytes = flat.numel() * flat.element_size()
        cut = pieces if pieces is not None else min(MOST_PIECES, max(1, size_bytes // PIECE_BYTES))
        program = self._prepared(
            flat, collective, algorithm, arrangement=arrangement, root=root, pieces=cut, servers=servers,
            regions=None if regions is None else tuple(regions),
        )  # fmt: skip
        if self.view.group is None:
            return nothing_to_wait_for
        if self._thread is None:
            raise CollectiveError(f"{collective} on a messenger that is closed. Build a new one for the group.")
        self._num_jobs += 1
        title = f"{collective} of {size_bytes:,} bytes by {algorithm}"
        job = _Job(program, flat, op, title, limit, _tag(self._num_jobs))
        self._jobs.put(job)
        return _Waiting(job, self._wire, self._given_up)

    def _prepared(
        self,
        flat: Tensor,
        collective: Collective,
        algorithm: str,
        *,
        arrangement: Arrangement | None,
        root: int,
        pieces: int,
        servers: int,
        regions: tuple[tuple[int, int], ...] | None,
    ) -> Program:
        key = (
            flat.numel(), flat.element_size(), collective, algorithm, root, pieces, servers, regions,
            None if arrangement is None else (tuple(arrangement.order), arrangement.nodes, arrangement.shape),
        )  # fmt: skip
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        schedule = build_schedule(
            algorithm, collective, self.view.index, self.view.size, arrangement=arrangement, root=root, pieces=pieces,
            servers=servers,
        )  # fmt: skip
        if regions is not None:
            _check_regions(regions, flat.numel(), self.view.size, collective)
            bounds = schedule.bounds_of_regions(regions)
        else:
            bounds = schedule.bounds(flat.numel())
        if collective == "all_to_all" and len({stop - start for start, stop in _edges(bounds, self.view.size)}) > 1:
            raise CollectiveError(
                f"all_to_all in place needs regions of one size: {flat.numel()} elements do not divide by "
                f"{self.view.size} ranks. Pad the tensor to {-(-flat.numel() // self.view.size) * self.view.size}."
            )
        program = prepare(schedule, bounds, flat.element_size())
        self._programs[key] = program
        if len(self._programs) > _KEPT_PROGRAMS:
            self._programs.popitem(last=False)
        return program


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The wait of one job.  While it lasts it looks whether another rank has given up, which the thread, waiting for a
    message, cannot see."""

    job: _Job
    wire: Wire
    given_up: GivenUp

    def __call__(self) -> None:
        while not self.job.done.wait(_POLL_SECONDS):
            if self.wire.board.has_alarm():
                give_up(self.wire, self.given_up)
        if self.job.error is not None:
            raise self.job.error


def _serve(jobs: queue.SimpleQueue[_Job | None], wire: Wire, given_up: GivenUp) -> None:
    """Body of the thread: one job after another until None comes.  It must not hold the messenger."""
    scratch = torch.empty(0, dtype=torch.uint8)
    while (job := jobs.get()) is not None:
        if scratch.numel() < job.program.scratch_bytes:
            scratch = torch.empty(job.program.scratch_bytes, dtype=torch.uint8)
        try:
            execute(
                job.program, job.flat, job.op, wire, given_up, scratch,
                title=job.title, tag=job.tag, deadline_seconds=job.deadline_seconds,
            )  # fmt: skip
        except BaseException as error:  # whoever waits gets it
            job.error = error
        job.done.set()
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
    each = (len(bounds) - 1) // members
    return [(bounds[rank * each], bounds[(rank + 1) * each]) for rank in range(members)]


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise CollectiveError(f"deadline_seconds = {seconds:g}: use more than 0.")
    return seconds


def _tag(number: int) -> int:
    """Of one collective's messages, apart from the small numbers of those that others send over the group."""
    return (1 << 30) + number % (1 << 20)
