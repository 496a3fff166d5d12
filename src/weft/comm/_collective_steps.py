"""The steps of one collective over one buffer: a schedule's parts become elements, messages get scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.algorithms import NodeRound, Run, Runs, Schedule, Step
from weft.errors import CollectiveError

_ALIGNMENT = 64
"""Bytes between the beginnings of buffers in scratch memory: one cache line."""

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_BOOL = frozenset({torch.bool})


@dataclass(frozen=True, slots=True)
class Combine:
    """The operation by which two tensors of one dtype are reduced."""

    function: Callable[..., Tensor]
    """Called as function(a, b, out=…)."""
    is_mean: bool
    """Whether the total is divided by the number of ranks at the end."""
    number: int
    """torch's number of the operation; that of SUM for a mean, which is divided at the end."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.function(a, b, out=out)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to send: runs of elements; several runs are packed into one buffer."""

    peer: int
    runs: Runs
    size: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message to receive, straight to its place or, if `is_staged`, to scratch memory first."""

    peer: int
    runs: Runs
    size: int
    is_staged: bool
    reduce: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """Messages of several ranks that are added to the same elements, in the order of the ranks."""

    runs: Runs
    before: tuple[int, ...]
    """Indices, among the step's receives, of the messages from ranks below the receiver."""
    after: tuple[int, ...]
    """Indices of those from ranks above it."""


@dataclass(frozen=True, slots=True)
class ElementStep:
    """One step over elements."""

    phase: str
    sends: tuple[Outgoing, ...]
    receives: tuple[Incoming, ...]
    sums: tuple[Sum, ...]
    is_overwriting: bool
    """Whether received elements overlap those that are being sent: then the sends must have left first."""


@dataclass(frozen=True, slots=True)
class NodeCall:
    """One call of all ranks of a node over the memory that they share."""

    kind: Literal["sum", "spread"]
    """Kind of the round, as `weft.comm.algorithms.NodeRound` has them."""
    regions: Runs
    """Elements that each rank of the node owns; an empty run where it owns none."""
    phase: str = "inside the node"


@dataclass(frozen=True, slots=True)
class CollectiveSteps:
    """All steps of one rank over one buffer."""

    moves: Schedule
    bounds: tuple[int, ...]
    """First element of each part, and the number of elements."""
    steps: tuple[NodeCall | ElementStep, ...]
    scratch_bytes: int

    @property
    def num_messages(self) -> int:
        """Messages that this rank sends to others."""
        steps = [step for step in self.steps if isinstance(step, ElementStep)]
        return sum(message.peer != self.moves.rank for step in steps for message in step.sends)

    @property
    def own_region(self) -> Run:
        """Elements of this rank's region, where the collective has regions; all of them otherwise."""
        if self.moves.collective in ("all_reduce", "broadcast"):
            return self.bounds[0], self.bounds[-1]
        parts, rank = self.moves.parts_per_member, self.moves.rank
        return self.bounds[rank * parts], self.bounds[(rank + 1) * parts]


def prepare(moves: Schedule, bounds: tuple[int, ...], element_bytes: int) -> CollectiveSteps:
    """Make a schedule ready for a buffer whose parts begin at `bounds`.  Empty messages are left out on both sides."""
    actions = tuple(_action(step, moves.rank, bounds) for step in moves.steps)
    scratch = max((_scratch_bytes(action, element_bytes) for action in actions), default=0)
    messages = tuple(action for action in actions if action.sends or action.receives)
    before, after = (
        tuple(call for node_round in rounds for call in _node_calls(node_round, bounds))
        for rounds in (moves.before, moves.after)
    )
    return CollectiveSteps(moves, bounds, (*before, *messages, *after), scratch)


def _node_calls(node_round: NodeRound, bounds: tuple[int, ...]) -> Iterator[NodeCall]:
    """Yield the node's calls, the same on all its ranks; each takes one run of elements from each rank."""
    owned = [_elements(runs, bounds) for runs in node_round.regions]
    for regions in zip_longest(*owned, fillvalue=(0, 0)):
        yield NodeCall(node_round.kind, regions)


def padded(num_bytes: int) -> int:
    """Return the bytes that a buffer takes of scratch memory, whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _action(step: Step, rank: int, bounds: tuple[int, ...]) -> ElementStep:
    sends = [(send.peer, _elements(send.runs, bounds)) for send in step.sends]
    outgoing = [Outgoing(peer, runs, _size(runs)) for peer, runs in sends if runs]
    sent = [run for out in outgoing for run in out.runs]
    incoming: list[Incoming] = []
    for receive in step.receives:
        runs = _elements(receive.runs, bounds)
        if not runs:
            continue
        # Straight into place where possible.  A message is staged if it is added, if its runs lie apart, if it comes
        # from this rank itself, or if its place still holds elements that leave in the same step.
        staged = receive.reduce or len(runs) > 1 or receive.peer == rank or _overlap(runs, sent)
        incoming.append(Incoming(receive.peer, runs, _size(runs), staged, receive.reduce))
    written = [run for message in incoming for run in message.runs]
    return ElementStep(step.phase, tuple(outgoing), tuple(incoming), _sums(incoming, rank), _overlap(written, sent))


def _sums(incoming: Sequence[Incoming], rank: int) -> tuple[Sum, ...]:
    groups: dict[Runs, list[int]] = {}
    for index, message in enumerate(incoming):
        if message.reduce:
            groups.setdefault(message.runs, []).append(index)
    sums: list[Sum] = []
    for runs, indices in groups.items():
        ordered = sorted(indices, key=lambda index: incoming[index].peer)
        below = tuple(index for index in ordered if incoming[index].peer < rank)
        sums.append(Sum(runs, below, tuple(ordered[len(below) :])))
    # Else the order of additions to an element would depend on the message, and ranks would get different bits.
    together = [run for runs in groups for run in runs]
    assert not any(_overlap([run], together[:index]) for index, run in enumerate(together)), (
        "messages of one step that are added up must hold the same parts, or none in common"
    )
    return tuple(sums)


def _elements(runs: Runs, bounds: tuple[int, ...]) -> Runs:
    merged: list[Run] = []
    for first, stop in runs:
        start, end = bounds[first], bounds[stop]
        if start == end:  # a tensor may have fewer elements than parts
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def _size(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _overlap(some: Sequence[Run], others: Sequence[Run]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def _scratch_bytes(action: ElementStep, element_bytes: int) -> int:
    packed = sum(padded(out.size * element_bytes) for out in action.sends if len(out.runs) > 1)
    return packed + sum(padded(m.size * element_bytes) for m in action.receives if m.is_staged)


def add_up(action: ElementStep, flat: Tensor, buffers: Sequence[Tensor], combine: Combine | None) -> None:
    """Add or copy received messages into `flat`: sums in the order of ranks, this rank's own part among them."""
    assert combine is not None or not action.sums, "only reductions add up"
    if combine is not None:
        for total in action.sums:
            _add_up(total, flat, buffers, combine)
    for message, buffer in zip(action.receives, buffers, strict=True):
        if message.is_staged and not message.reduce:
            at = 0
            for start, stop in message.runs:
                flat[start:stop].copy_(buffer[at : at + stop - start])
                at += stop - start


def _add_up(total: Sum, flat: Tensor, buffers: Sequence[Tensor], combine: Combine) -> None:
    # ((lower ranks in order) + own) + higher ranks in order: one order of additions whatever the order of arrival, so
    # every rank gets the same bits.
    for index in total.before[1:]:
        first = buffers[total.before[0]]
        combine(first, buffers[index], first)
    at = 0
    for start, stop in total.runs:
        own, here = flat[start:stop], slice(at, at + stop - start)
        if total.before:
            combine(buffers[total.before[0]][here], own, own)
        for index in total.after:
            combine(own, buffers[index][here], own)
        at = here.stop


def combiner(op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Combine:
    """Return how tensors of a type are reduced.

    Raises:
        CollectiveError: the operation makes no sense for the type.
    """
    names: dict[dist.ReduceOp.RedOpType, tuple[str, frozenset[torch.dtype]]] = {
        dist.ReduceOp.SUM: ("SUM", _INTEGERS | _FLOATS | _COMPLEX),
        dist.ReduceOp.AVG: ("AVG", _FLOATS | _COMPLEX),
        dist.ReduceOp.PRODUCT: ("PRODUCT", _INTEGERS | _FLOATS | _COMPLEX | _BOOL),
        dist.ReduceOp.MIN: ("MIN", _INTEGERS | _FLOATS | _BOOL),
        dist.ReduceOp.MAX: ("MAX", _INTEGERS | _FLOATS | _BOOL),
        dist.ReduceOp.BAND: ("BAND", _INTEGERS | _BOOL),
        dist.ReduceOp.BOR: ("BOR", _INTEGERS | _BOOL),
        dist.ReduceOp.BXOR: ("BXOR", _INTEGERS | _BOOL),
    }
    if op not in names:
        raise CollectiveError(f"reduce op {op} is none of {', '.join(name for name, _ in names.values())}.")
    name, dtypes = names[op]
    if dtype not in dtypes:
        fitting = [other for other, (_, known) in names.items() if dtype in known]
        does = ", ".join(names[other][0] for other in fitting)
        raise CollectiveError(
            f"{name} is not defined for {dtype}. " + (f"It has {does}." if does else "Cast it first.")
        )
    if dtype in _BOOL:  # of bools, product and minimum are `and`, and the maximum is `or`
        name = {"PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}.get(name, name)
    functions: dict[str, Callable[..., Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    number = int(dist.ReduceOp.SUM if name == "AVG" else op)  # pyright: ignore[reportArgumentType]  # an enum of C++
    return Combine(functions[name], is_mean=name == "AVG", number=number)
