"""One rank's part of a collective: receive, send, add up, step by step; and what happens when a rank is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._node import NodeMemory
from weft.comm._program import Action, Combine, NodeCall, Program, add_up, padded
from weft.comm._trouble import Board, Reason, Report
from weft.comm.shared_memory import Failure, GroupFailed, SharedMemoryGroup, Trouble, explain
from weft.errors import CollectiveError

_GRACE_SHARE = 0.25
"""Of a deadline, that is left for ranks to tell each other who is missing, one second at most."""
_BREAKING_TAG = (1 << 31) - 7
"""Of messages that nobody sends: see `give_up`."""
_TINY = timedelta(milliseconds=1)


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
    """Who was waited for.  A rank that has given up is not missing: it has said itself for whom it waited."""
    who = failure.reporter if failure.trouble is Trouble.ABORTED else failure.culprit
    waits_for = (node.members[who],) if 0 <= who < len(node.members) and who != node.index else ()
    is_late = failure.trouble is Trouble.DEADLINE and failure.culprit == node.index  # it is told what others said of it
    reason: Reason = "deadline" if failure.trouble is Trouble.DEADLINE and not is_late else "closed"
    broken = _BrokenError(reason, waits_for, failure.trouble.name)
    if failure.trouble is Trouble.MISMATCH:
        ranks = [turn.wire.ranks[member] for member in node.members]
        broken.told = explain(failure, None, ranks, turn.deadline_seconds)
    return broken


def _exchange(action: Action, flat: Tensor, scratch: Tensor, turn: _Turn) -> list[Tensor]:
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


def _move_own(action: Action, buffers: Sequence[Tensor], own: Sequence[Tensor], me: int) -> None:
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
            # The group is broken now: what has not come by now raises at once.
            late = tuple(other for other, pending in works[index + 1 :] if not _has_come(pending))
            raise _BrokenError("deadline", (peer, *late), str(error)) from None


def _has_come(work: dist.Work) -> bool:
    try:
        work.wait(_TINY)
    except RuntimeError:
        return False
    return True


def give_up(wire: Wire, given_up: GivenUp) -> None:
    """Close all connections of the group, so that every rank that waits for this one stops waiting.

    Gloo has one way to do so: a wait that times out closes them, and wakes all other waits of the process, too.
    Ranks that wait for it over memory, the node's or the group's, are released as well.
    """
    with given_up.lock:
        if given_up.is_up:
            return
        given_up.is_up = True
    if wire.node is not None:
        wire.node.abort()
    if wire.shared is not None:
        wire.shared.transport.abort()
    never = torch.empty(1, dtype=torch.uint8)
    for peer in range(len(wire.ranks)):
        if peer == wire.index:
            continue
        try:
            work = wire.group.recv([never], peer, _BREAKING_TAG)
        except RuntimeError:  # closed already: try the next one
            continue
        _has_come(work)
        return


def _diagnosed(error: _BrokenError, turn: _Turn, given_up: GivenUp, place: str) -> CollectiveError:
    """Tell the others, find out who is missing, and say so."""
    wire = turn.wire
    elapsed = time.monotonic() - turn.started
    before = wire.board.reports()
    gave_up = {rank: report for rank, report in before.items() if report.reason == "deadline"}
    blamed_by = [rank for rank, report in gave_up.items() if wire.index in report.waits_for]
    if error.reason == "closed" and blamed_by and elapsed < turn.deadline_seconds / 2:
        give_up(wire, given_up)
        return CollectiveError(
            f"{turn.title}: this rank ({wire.ranks[wire.index]}) came too late. {_ranks(wire, blamed_by)} had waited "
            "for it and given up. Find out what kept it, or raise the deadline.",
            status=1,
        )
    own = Report(error.waits_for, "alarm" if given_up.is_up and error.reason == "closed" else error.reason)
    wire.board.leave(wire.index, own)
    give_up(wire, given_up)
    if error.told is not None:
        return error.told
    missing, reports = wire.board.missing(wire.index, own, turn.grace_seconds)
    names = _ranks(wire, missing or error.waits_for)
    if any(report.reason == "deadline" for report in reports.values()):
        what = f"sent nothing within the deadline of {turn.deadline_seconds:g} s"
    else:
        what = "left, or stopped answering"
    waited = _ranks(wire, error.waits_for)
    return CollectiveError(
        f"{turn.title} over {len(wire.ranks)} ranks: {names} {what}. This rank ({wire.ranks[wire.index]}) was in "
        f"{place}, waiting for {waited}, after {elapsed:.1f} s. See what the missing rank printed last; the group is "
        "closed and must be built again.",
        status=1,
    )


def _ranks(wire: Wire, indices: Sequence[int]) -> str:
    if not indices:
        return "another rank"
    names = ", ".join(str(wire.ranks[index]) for index in sorted(indices))
    return f"rank {names}" if len(indices) == 1 else f"ranks {names}"
