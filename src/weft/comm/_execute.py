"""One rank's part of a collective: receive, send and add up, step by step; the diagnosis where a rank is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._collective_steps import CollectiveSteps, Combine, ElementStep, NodeCall, add_up, padded
from weft.comm._failure import ErrorCode, Failure
from weft.comm._failure_table import FailureReport, FailureTable, Reason
from weft.comm._node import NodeMemory
from weft.comm.shared_memory._call import GroupFailed
from weft.comm.shared_memory._failure import explain
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.comm.watched_group import close_connections
from weft.errors import CollectiveError

_GRACE_SHARE = 0.25
"""Share of a timeout that is left for ranks to tell each other who is missing, one second at most."""
_TINY = timedelta(milliseconds=1)
_HOST = 0
"""Global rank that serves the store, where no launcher does (`env://` and torch's other ways to meet)."""


@dataclass(slots=True)
class Channel:
    """The connections of a group's collectives.  Where a rank is missing they are closed, for good."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks, by which errors name them."""
    index: int
    failures: FailureTable
    node: NodeMemory | None = None
    """The memory that the ranks of this host share, for collectives in levels; None: messages alone."""
    shared: SharedMemoryGroup | None = None
    """The group itself, where all of its ranks share memory: closed together with the messages."""
    error: CollectiveError | None = None
    """The error of the collective that found a rank missing; later ones repeat it."""
    scratch: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    is_closed: bool = False
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close all connections of the group, so that every rank that waits for this one stops waiting, those that wait
        over memory, the node's or the group's, among them."""
        with self._closing:  # the waiting caller and the watching thread may both find the failure
            if self.is_closed:
                return
            self.is_closed = True
        if self.node is not None:
            self.node.abort()
        if self.shared is not None:
            self.shared.engine.abort()
        close_connections(self.group)


@dataclass(frozen=True, slots=True)
class PreparedCollective:
    """One collective, ready to run."""

    prepared: CollectiveSteps
    flat: Tensor
    """The tensor, (elements,), on the CPU, that is worked on in place."""
    combine: Combine | None
    """The reduction; None where the collective reduces nothing."""
    title: str
    """The name in errors."""
    tag: int
    """The tag of all its messages."""
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """One collective while it runs."""

    task: PreparedCollective
    channel: Channel
    started: float
    """Monotonic second at which it began."""

    @property
    def grace_seconds(self) -> float:
        """Seconds before the timeout that are kept for ranks to tell each other who is missing."""
        return min(1.0, _GRACE_SHARE * self.task.timeout_seconds)

    @property
    def left_seconds(self) -> float:
        """Seconds until this rank gives up waiting for messages."""
        return self.started + self.task.timeout_seconds - self.grace_seconds - time.monotonic()


class _BrokenError(Exception):
    """A message was not sent or received."""

    def __init__(self, reason: Reason, waits_for: tuple[int, ...], cause: str) -> None:
        super().__init__(cause)
        self.reason: Reason = reason
        self.waits_for = waits_for
        self.told: CollectiveError | None = None
        """The full error where no rank is missing (different calls on the ranks of a node); None: find out who is."""


def execute(task: PreparedCollective, channel: Channel) -> None:
    """Do all steps of a collective.

    Raises:
        CollectiveError: a rank is missing; the channel was closed before.
    """
    prepared, flat, combine = task.prepared, task.flat, task.combine
    if channel.error is not None:
        raise CollectiveError(f"{task.title}: the group was given up before. {channel.error}")
    if channel.scratch.numel() < prepared.scratch_bytes:
        channel.scratch = torch.empty(prepared.scratch_bytes, dtype=torch.uint8)
    turn = _Turn(task, channel, time.monotonic())
    # A step begins when the one before is done on this rank; no barrier is needed, because every message has one
    # receiver that waits for it.
    for number, step in enumerate(prepared.steps, start=1):
        try:
            if isinstance(step, NodeCall):
                _call_node(step, turn)
                continue
            buffers = _exchange(step, turn)
        except _BrokenError as error:
            place = f"step {number} of {len(prepared.steps)} ({step.phase})"
            channel.error = _diagnosed(error, turn, place)
            raise channel.error from None
        add_up(step, flat, buffers, combine)
    # Divided once at the end, of this rank's region alone: halves of an all-reduce hand finished numbers around.
    if combine is not None and combine.is_mean:
        start, stop = prepared.own_region
        flat[start:stop].div_(len(channel.ranks))


def _call_node(call: NodeCall, turn: _Turn) -> None:
    """Run one call over the memory of this rank's node; its failures become those of messages."""
    node = turn.channel.node
    assert node is not None, "calls of a node are prepared where there is its memory"
    try:
        node.perform(call, turn.task.flat, turn.task.combine, max(0.001, turn.left_seconds))
    except GroupFailed as failed:
        raise _broken_inside(failed.failure, node, turn) from None


def _broken_inside(failure: Failure, node: NodeMemory, turn: _Turn) -> _BrokenError:
    """Return the error that names the rank which this one waited for.  A rank that has given up is not missing: its own
    report names the rank for which it waited."""
    who = failure.reporter if failure.code is ErrorCode.ABORTED else failure.culprit
    waits_for = (node.members[who],) if 0 <= who < len(node.members) and who != node.index else ()
    # The engine blames this rank itself: the others' reports, which it reads next, say what it is late for.
    is_late = failure.code is ErrorCode.DEADLINE and failure.culprit == node.index
    reason: Reason = "deadline" if failure.code is ErrorCode.DEADLINE and not is_late else "closed"
    broken = _BrokenError(reason, waits_for, failure.code.name)
    if failure.code is ErrorCode.MISMATCH:
        ranks = [turn.channel.ranks[member] for member in node.members]
        broken.told = explain(failure, None, ranks, turn.task.timeout_seconds)
    return broken


def _exchange(action: ElementStep, turn: _Turn) -> list[Tensor]:
    """Send and receive the messages of one step; return what has come, by incoming message."""
    group, me, flat, tag = turn.channel.group, turn.channel.index, turn.task.flat, turn.task.tag
    taken = 0

    def borrowed(size: int) -> Tensor:
        nonlocal taken
        num_bytes = size * flat.element_size()
        buffer = turn.channel.scratch[taken : taken + num_bytes].view(flat.dtype)
        taken += padded(num_bytes)
        return buffer

    buffers = [
        borrowed(message.size) if message.is_staged else flat[slice(*message.runs[0])] for message in action.receives
    ]
    receives: list[tuple[int, dist.Work]] = []
    sends: list[tuple[int, dist.Work]] = []
    own: list[Tensor] = []
    peer = me
    # All receives are posted before the first send: two ranks that send to each other would otherwise wait for room.
    try:
        for message, buffer in zip(action.receives, buffers, strict=True):
            peer = message.peer
            if peer != me:
                receives.append((peer, group.recv([buffer], peer, tag)))
        for out in action.sends:
            peer = out.peer
            content = flat[slice(*out.runs[0])]
            if len(out.runs) > 1:  # runs that lie apart are packed: one message costs less than several
                content = borrowed(out.size)
                torch.cat([flat[start:stop] for start, stop in out.runs], out=content)
            if peer == me:
                own.append(content)
            else:
                sends.append((peer, group.send([content], peer, tag)))
    except RuntimeError as error:  # the connection is closed already
        raise _BrokenError("closed", (peer,), str(error)) from None
    _await(receives, turn)
    _move_own(action, buffers, own, me)
    _await(sends, turn)
    return buffers


def _move_own(action: ElementStep, buffers: Sequence[Tensor], own: Sequence[Tensor], me: int) -> None:
    mine = [buffer for message, buffer in zip(action.receives, buffers, strict=True) if message.peer == me]
    for buffer, content in zip(mine, own, strict=True):
        buffer.copy_(content)


def _await(works: Sequence[tuple[int, dist.Work]], turn: _Turn) -> None:
    for index, (peer, work) in enumerate(works):
        try:
            work.wait(timedelta(seconds=max(0.001, turn.left_seconds)))
        except RuntimeError as error:
            if turn.left_seconds > 0:
                raise _BrokenError("closed", (peer,), str(error)) from None
            # A timeout breaks the whole group, so every receive that is still pending fails at once.
            late = tuple(other for other, pending in works[index + 1 :] if not _has_come(pending))
            raise _BrokenError("deadline", (peer, *late), str(error)) from None


def _has_come(work: dist.Work) -> bool:
    try:
        work.wait(_TINY)
    except RuntimeError:
        return False
    return True


def _diagnosed(error: _BrokenError, turn: _Turn, place: str) -> CollectiveError:
    """Report to the others, find out which rank is missing, and return the error that names it."""
    channel = turn.channel
    elapsed = time.monotonic() - turn.started
    # A connection that closes early was closed by a rank that had given up.  If its report names this rank, this rank
    # is the late one, and must not blame the other.
    came_late = error.reason == "closed" and elapsed < turn.task.timeout_seconds / 2
    blamed_by = _blamed_by(channel.failures.reports(), channel.index)
    if came_late and blamed_by:
        channel.close()
        return _too_late(turn, blamed_by)
    # The report is written before connections close: whoever is woken by the close finds it.
    own = FailureReport(error.waits_for, "alarm" if channel.is_closed and error.reason == "closed" else error.reason)
    channel.failures.leave(channel.index, own)
    channel.close()
    if error.told is not None:
        return error.told
    missing, reports = channel.failures.missing(channel.index, own, turn.grace_seconds)
    # A rank gives up one grace before the deadline; it is later only where something else kept it from looking.
    was_kept = elapsed > turn.task.timeout_seconds
    if was_kept and not missing and (blamed_by := _blamed_by(reports, channel.index)):
        return _too_late(turn, blamed_by)
    who = _who_is_missing(missing or error.waits_for, reports, turn)
    return CollectiveError(
        f"{turn.task.title} over {len(channel.ranks)} ranks: {who}. This rank ({channel.ranks[channel.index]}) was in "
        f"{place}, waiting for {_ranks(channel, error.waits_for)}, after {elapsed:.1f} s. See what the missing rank "
        "printed last; if it was only slow, raise the deadline: compute.collective_timeout_seconds in the plan. The "
        "group is closed and must be built again.",
        status=1,
    )


def _blamed_by(reports: Mapping[int, FailureReport], index: int) -> list[int]:
    """Return the ranks that waited for rank `index`; empty where no rank waited until its deadline.

    The first rank that does so closes all connections, so the other reports of a closed connection prove nothing.
    """
    if not any(report.reason == "deadline" for who, report in reports.items() if who != index):
        return []
    return [who for who, report in reports.items() if index in report.waits_for]


def _too_late(turn: _Turn, blamed_by: Sequence[int]) -> CollectiveError:
    channel = turn.channel
    return CollectiveError(
        f"{turn.task.title}: this rank ({channel.ranks[channel.index]}) came too late. {_ranks(channel, blamed_by)}"
        " had waited for it and given up. Find out what kept it, or raise the deadline:"
        " compute.collective_timeout_seconds in the plan.",
        status=1,
    )


def _who_is_missing(missing: Sequence[int], reports: Mapping[int, FailureReport], turn: _Turn) -> str:
    """Return a sentence about the missing ranks.  Nobody is blamed for a missing report if the store itself is gone."""
    channel = turn.channel
    if any(report.reason == "deadline" for report in reports.values()):
        what = f"sent nothing within the deadline of {turn.task.timeout_seconds:g} s"
    else:
        what = "left, or stopped answering"
    host_has_spoken = any(channel.ranks[index] == _HOST for index in reports if index != channel.index)
    if channel.failures.state == "there" or host_has_spoken:
        return f"{_ranks(channel, missing)} {what}"
    store = "is gone" if channel.failures.state == "gone" else "does not answer"
    if any(channel.ranks[index] == _HOST for index in missing):
        return f"rank {_HOST} {what}, and the group's store {store}"
    host = "the launcher" if channel.ranks[channel.index] == _HOST else f"rank {_HOST}, unless a launcher serves it"
    return (
        f"the group's store {store}, in which ranks say for whom they wait; so who is missing is not known, but most "
        f"likely it is the store's host: {host}"
    )


def _ranks(channel: Channel, indices: Sequence[int]) -> str:
    if not indices:
        return "another rank"
    names = ", ".join(str(channel.ranks[index]) for index in sorted(indices))
    return f"rank {names}" if len(indices) == 1 else f"ranks {names}"
