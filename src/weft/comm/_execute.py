"""One rank's part of a collective: receive, send, add up, step by step; and what happens when a rank is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._failure import ErrorCode, Failure
from weft.comm._node import NodeMemory
from weft.comm._program import Combine, ElementStep, NodeCall, Program, add_up, padded
from weft.comm._trouble import Board, FailureReport, Reason
from weft.comm._watched_group import close_connections
from weft.comm.shared_memory._call import GroupFailed
from weft.comm.shared_memory._failure import explain
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.errors import CollectiveError

_GRACE_SHARE = 0.25
"""Share of a deadline that is left for ranks to tell each other who is missing, one second at most."""
_TINY = timedelta(milliseconds=1)
_HOST = 0
"""Global rank that serves the store, where no launcher does (`env://` and torch's other ways to meet)."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The group that carries the messages."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks, by which errors name them."""
    index: int
    board: Board
    node: NodeMemory | None = None
    """What the ranks of this host share, for collectives in levels."""
    shared: SharedMemoryGroup | None = None
    """The group itself, where all of its ranks share memory: given up together with the messages."""


@dataclass(slots=True)
class GivenUp:
    """Whether this rank has given up on its group, which happens once."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_up: bool = False
    error: CollectiveError | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One collective while it runs."""

    wire: Wire
    title: str
    tag: int
    started: float
    stop: float
    """Monotonic second at which it gives up."""
    grace_seconds: float
    deadline_seconds: float


class _BrokenError(Exception):
    """A message did not come or go."""

    def __init__(self, reason: Reason, waits_for: tuple[int, ...], cause: str) -> None:
        super().__init__(cause)
        self.reason: Reason = reason
        self.waits_for = waits_for
        self.told: CollectiveError | None = None
        """All there is to say, where nobody is missing."""


def execute(
    program: Program,
    flat: Tensor,
    combine: Combine | None,
    wire: Wire,
    given_up: GivenUp,
    scratch: Tensor,
    *,
    title: str,
    tag: int,
    deadline_seconds: float,
) -> None:
    """Do all steps of a program on a flat CPU tensor.

    Args:
        combine: how sums are made; None where the collective makes none.
        scratch: bytes, at least as many as the program asks for.
        title: of the collective, for errors.
        tag: of its messages.

    Raises:
        CollectiveError: a rank is missing; the group has been given up before.
    """
    if given_up.error is not None:
        raise CollectiveError(f"{title}: the group was given up before. {given_up.error}")
    now = time.monotonic()
    grace = min(1.0, _GRACE_SHARE * deadline_seconds)
    turn = _Turn(wire, title, tag, now, now + deadline_seconds - grace, grace, deadline_seconds)
    steps = program.steps
    for number, step in enumerate(steps):
        try:
            if isinstance(step, NodeCall):
                _call_node(step, flat, combine, turn)
                continue
            buffers = _exchange(step, flat, scratch, turn)
        except _BrokenError as error:
            place = f"step {number + 1} of {len(steps)} ({step.phase})"
            given_up.error = _diagnosed(error, turn, given_up, place)
            raise given_up.error from None
        add_up(step, flat, buffers, combine)
    if combine is not None and combine.is_mean:
        start, stop = program.own_region
        flat[start:stop].div_(len(wire.ranks))


def _call_node(call: NodeCall, flat: Tensor, combine: Combine | None, turn: _Turn) -> None:
    """One call over the memory of this rank's node; its troubles become those that messages have."""
    node = turn.wire.node
    assert node is not None, "calls of a node are prepared where there is its memory"
    try:
        node.perform(call, flat, combine, max(0.001, turn.stop - time.monotonic()))
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
        ranks = [turn.wire.ranks[member] for member in node.members]
        broken.told = explain(failure, None, ranks, turn.deadline_seconds)
    return broken


def _exchange(action: ElementStep, flat: Tensor, scratch: Tensor, turn: _Turn) -> list[Tensor]:
    """Send and receive the messages of one step; return what has come, by incoming message."""
    group, me = turn.wire.group, turn.wire.index
    taken = 0

    def borrowed(size: int) -> Tensor:
        nonlocal taken
        num_bytes = size * flat.element_size()
        buffer = scratch[taken : taken + num_bytes].view(flat.dtype)
        taken += padded(num_bytes)
        return buffer

    buffers = [
        borrowed(message.size) if message.is_staged else flat[slice(*message.runs[0])] for message in action.receives
    ]
    receives: list[tuple[int, dist.Work]] = []
    sends: list[tuple[int, dist.Work]] = []
    own: list[Tensor] = []
    peer = me
    try:
        for message, buffer in zip(action.receives, buffers, strict=True):
            peer = message.peer
            if peer != me:
                receives.append((peer, group.recv([buffer], peer, turn.tag)))
        for out in action.sends:
            peer = out.peer
            content = flat[slice(*out.runs[0])]
            if len(out.runs) > 1:
                content = borrowed(out.size)
                torch.cat([flat[start:stop] for start, stop in out.runs], out=content)
            if peer == me:
                own.append(content)
            else:
                sends.append((peer, group.send([content], peer, turn.tag)))
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
        left = max(0.001, turn.stop - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            if time.monotonic() < turn.stop:
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


def give_up(wire: Wire, given_up: GivenUp) -> None:
    """Close all connections of the group, so that every rank that waits for this one stops waiting, those that wait
    over memory, the node's or the group's, among them."""
    with given_up.lock:
        if given_up.is_up:
            return
        given_up.is_up = True
    if wire.node is not None:
        wire.node.abort()
    if wire.shared is not None:
        wire.shared.engine.abort()
    close_connections(wire.group)


def _diagnosed(error: _BrokenError, turn: _Turn, given_up: GivenUp, place: str) -> CollectiveError:
    """Tell the others, find out who is missing, and say so."""
    wire = turn.wire
    elapsed = time.monotonic() - turn.started
    came_late = error.reason == "closed" and elapsed < turn.deadline_seconds / 2
    blamed_by = _blamed_by(wire.board.reports(), wire.index)
    if came_late and blamed_by:
        give_up(wire, given_up)
        return _too_late(turn, blamed_by)
    own = FailureReport(error.waits_for, "alarm" if given_up.is_up and error.reason == "closed" else error.reason)
    wire.board.leave(wire.index, own)
    give_up(wire, given_up)
    if error.told is not None:
        return error.told
    missing, reports = wire.board.missing(wire.index, own, turn.grace_seconds)
    # A rank gives up one grace before the deadline; it is later only where something else kept it from looking.
    was_kept = elapsed > turn.deadline_seconds
    if was_kept and not missing and (blamed_by := _blamed_by(reports, wire.index)):
        return _too_late(turn, blamed_by)
    who = _who_is_missing(missing or error.waits_for, reports, turn)
    return CollectiveError(
        f"{turn.title} over {len(wire.ranks)} ranks: {who}. This rank ({wire.ranks[wire.index]}) was in "
        f"{place}, waiting for {_ranks(wire, error.waits_for)}, after {elapsed:.1f} s. See what the missing rank "
        "printed last; if it was only slow, raise the deadline: compute.collective_timeout_seconds in the plan. The "
        "group is closed and must be built again.",
        status=1,
    )


def _blamed_by(reports: Mapping[int, FailureReport], index: int) -> list[int]:
    """Who waited for a rank, where somebody waited until the deadline: the first to do so closes all connections."""
    if not any(report.reason == "deadline" for who, report in reports.items() if who != index):
        return []
    return [who for who, report in reports.items() if index in report.waits_for]


def _too_late(turn: _Turn, blamed_by: Sequence[int]) -> CollectiveError:
    wire = turn.wire
    return CollectiveError(
        f"{turn.title}: this rank ({wire.ranks[wire.index]}) came too late. {_ranks(wire, blamed_by)} had waited "
        "for it and given up. Find out what kept it, or raise the deadline: compute.collective_timeout_seconds in the "
        "plan.",
        status=1,
    )


def _who_is_missing(missing: Sequence[int], reports: Mapping[int, FailureReport], turn: _Turn) -> str:
    """Names and what they did.  Ranks that could not report are not blamed where the store is missing itself."""
    wire = turn.wire
    if any(report.reason == "deadline" for report in reports.values()):
        what = f"sent nothing within the deadline of {turn.deadline_seconds:g} s"
    else:
        what = "left, or stopped answering"
    host_has_spoken = any(wire.ranks[index] == _HOST for index in reports if index != wire.index)
    if wire.board.state == "there" or host_has_spoken:
        return f"{_ranks(wire, missing)} {what}"
    store = "is gone" if wire.board.state == "gone" else "does not answer"
    if any(wire.ranks[index] == _HOST for index in missing):
        return f"rank {_HOST} {what}, and the group's store {store}"
    host = "the launcher" if wire.ranks[wire.index] == _HOST else f"rank {_HOST}, unless a launcher serves it"
    return (
        f"the group's store {store}, in which ranks say for whom they wait; so who is missing is not known, but most "
        f"likely it is the store's host: {host}"
    )


def _ranks(wire: Wire, indices: Sequence[int]) -> str:
    if not indices:
        return "another rank"
    names = ", ".join(str(wire.ranks[index]) for index in sorted(indices))
    return f"rank {names}" if len(indices) == 1 else f"ranks {names}"
