"""Pipeline schedules as orders of actions, without torch: the runner executes them, the planner prices them.

A model is cut into `pipeline × chunks` stages.  Every rank works through its own list of actions; an action waits for
what it needs from other ranks, so a list is an order, not a timetable.

Sources: GPipe, Huang et al. 2019 (arXiv 1811.06965); 1F1B, Narayanan et al. 2019 (PipeDream) and 2021 (with the
interleaving, arXiv 2104.04473); the split backward, ZB-H1, ZB-H2 and ZB-V, Qi et al. 2024 (arXiv 2401.10241,
2405.15362); DualPipeV, DeepSeek-V3 (arXiv 2412.19437) cut in half.

Interleaved and V schedules are defined for some numbers of microbatches only.  Other numbers take the order of the next
one that is, without the surplus microbatches: leaving out whole microbatches never breaks an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.techniques.pipeline.schedules import PricedSchedule, check_schedule, stage_ranks

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: ActionKind
    """Forward, whole backward, gradients of the inputs (I), gradients of the weights (W)."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Orders = tuple[tuple[Action, ...], ...]
"""Actions of each pipeline rank."""


def schedule_orders(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int) -> Orders:
    """Return every rank's actions for a training step.

    Raises:
        PlanError: the schedule does not exist with so many chunks.
    """
    return tuple(tuple(actions) for actions in schedule_streams(schedule, pipeline, chunks, microbatches))


def schedule_streams(
    schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int
) -> tuple[Iterator[Action], ...]:
    """Return `schedule_orders`, each rank's actions one by one as they are asked for.

    Raises:
        PlanError: the schedule does not exist with so many chunks.
    """
    check_schedule(schedule, pipeline, chunks)
    order_of = _ORDERS[schedule]
    return tuple(
        (action for action in order_of(pipeline, chunks, microbatches, rank) if action[2] < microbatches)
        for rank in range(pipeline)
    )


def forward_orders(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int) -> Orders:
    """Return every rank's actions for an evaluation: forwards only, in rounds of as many microbatches as ranks."""
    check_schedule(schedule, pipeline, chunks)
    ranks = stage_ranks(schedule, pipeline, chunks)
    return tuple(
        tuple(
            Action("F", stage, microbatch)
            for start in range(0, microbatches, pipeline)
            for stage in range(len(ranks))
            if ranks[stage] == rank
            for microbatch in range(start, min(start + pipeline, microbatches))
        )
        for rank in range(pipeline)
    )


def needs(action: Action, num_stages: int) -> Iterator[tuple[Literal["F", "I", "W"], int, int]]:
    """What must be done before an action, on any rank: (pass, stage, microbatch), a whole backward counting as I."""
    kind, stage, microbatch = action
    if kind == "F":
        if stage > 0:
            yield "F", stage - 1, microbatch
    elif kind == "W":
        yield "I", stage, microbatch
    else:
        yield "F", stage, microbatch
        if stage < num_stages - 1:
            yield "I", stage + 1, microbatch


def gives(action: Action) -> tuple[Literal["F", "I", "W"], int, int]:
    """What an action does, in the words of `needs`."""
    return ("I" if action.kind == "B" else action.kind), action.stage, action.microbatch


# ── the orders ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gpipe(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    del pipeline, chunks
    yield from (Action("F", rank, microbatch) for microbatch in range(microbatches))
    yield from (Action("B", rank, microbatch) for microbatch in range(microbatches))


def _rounds(pipeline: int, chunks: int, microbatches: int, rank: int, *, reverse: bool) -> list[tuple[int, int]]:
    """(stage, microbatch), interleaved: a round of `pipeline` microbatches through one chunk after another."""
    order = reversed(range(chunks)) if reverse else range(chunks)
    stages = [chunk * pipeline + rank for chunk in order]
    return [
        (stage, microbatch)
        for start in range(0, microbatches, pipeline)
        for stage in stages
        for microbatch in range(start, start + pipeline)
    ]


def _one_forward_one_backward(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    forwards = _rounds(pipeline, chunks, microbatches, rank, reverse=False)
    backwards = _rounds(pipeline, chunks, microbatches, rank, reverse=True)
    ahead = (pipeline - 1 - rank) * (1 if chunks == 1 else 2) + (chunks - 1) * pipeline
    ahead = min(ahead, len(forwards))
    for forward in forwards[:ahead]:
        yield Action("F", *forward)
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield Action("F", *forward)
        yield Action("B", *backward)
    for backward in backwards[len(forwards) - ahead :]:
        yield Action("B", *backward)


def _interleaved_zero_bubble(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """ZB-H1, interleaved: the later ranks, which would wait longest at the end, put off as many weight passes."""
    forwards = _rounds(pipeline, chunks, microbatches, rank, reverse=False)
    backwards = _rounds(pipeline, chunks, microbatches, rank, reverse=True)
    ahead = min((pipeline - 1 - rank) + (chunks - 1) * pipeline, len(forwards))
    put_off: deque[tuple[int, int]] = deque()
    for forward in forwards[:ahead]:
        yield Action("F", *forward)
    for index, backward in enumerate(backwards):
        steady = index < len(forwards) - ahead
        if steady:
            yield Action("F", *forwards[ahead + index])
        yield Action("I", *backward)
        put_off.append(backward)
        if len(put_off) > rank or not steady:
            yield Action("W", *put_off.popleft())
    for weights in put_off:
        yield Action("W", *weights)


def _zero_bubble_2p(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """ZB-H2: early ranks go as many forwards ahead as fill the wait for the first gradient, late ones put off as many
    weight passes: every rank holds 2p - 1 microbatches."""
    del chunks
    ahead = min(2 * (pipeline - 1 - rank), microbatches)
    put_off: deque[int] = deque()
    yield from (Action("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        steady = microbatch < microbatches - ahead
        if steady:
            yield Action("F", rank, ahead + microbatch)
        yield Action("I", rank, microbatch)
        put_off.append(microbatch)
        if len(put_off) > 2 * rank or not steady:
            yield Action("W", rank, put_off.popleft())
    yield from (Action("W", rank, microbatch) for microbatch in put_off)


class _VOrder:
    """Builds a V order in the words of the papers: F0 is the next forward of the first chunk, and so on."""

    def __init__(self, pipeline: int, rank: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * pipeline - 1 - rank)
        self._done = {(kind, chunk): 0 for kind in "FI" for chunk in (0, 1)}
        self.put_off: deque[tuple[int, int]] = deque()
        """(chunk, microbatch) of the weight passes still to do."""

    def count(self, kind: Literal["F", "I"], chunk: int) -> int:
        return self._done[kind, chunk]

    def forward(self, chunk: int) -> None:
        self._add("F", chunk, self._next("F", chunk))

    def backward(self, chunk: int, *, split: bool = False) -> None:
        microbatch = self._next("I", chunk)
        self._add("I" if split else "B", chunk, microbatch)
        if split:
            self.put_off.append((chunk, microbatch))

    def weights(self, chunk: int | None = None) -> None:
        """The oldest weight pass put off (of one chunk, if given); none is left: nothing."""
        for waiting in self.put_off:
            if chunk in (None, waiting[0]):
                self.put_off.remove(waiting)
                self._add("W", *waiting)
                return

    def _next(self, kind: str, chunk: int) -> int:
        self._done[kind, chunk] += 1
        return self._done[kind, chunk] - 1

    def _add(self, kind: ActionKind, chunk: int, microbatch: int) -> None:
        self.actions.append(Action(kind, self._stages[chunk], microbatch))


def _zbv(pipeline: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    """ZB-V: no waiting between a rank's first and last action when F, I and W take equally long."""
    del chunks
    simulated = max(microbatches, 2 * pipeline - 1)
    order = _VOrder(pipeline, rank)
    for _ in range(2 * (pipeline - rank) - 1):
        order.forward(0)
    for _ in range(rank):
        order.forward(1)
        order.forward(0)
    for _ in range(pipeline - rank):
        order.forward(1)
        order.backward(1, split=True)
        order.weights(1)
    while order.count("F", 1) < simulated:
        if order.count("F", 0) < simulated:
            order.forward(0)
        order.backward(0, split=True)
        order.weights(0)
        order.forward(1)
        order.backward(1, split=True)
        order.weights(1)
    for _ in range(rank):
        order.backward(0, split=True)
        order.backward(1, split=True)
    for _ in range(pipeline - rank):
        order.backward(0, split=True)
        order.weights(0)
    for chunk in (1, 0):
        while any(waiting[0] == chunk for waiting in order.put_off):
            order.weights(chunk)
    return order.actions


def _dualpipev(pipeline: int, chunks: int, microbatches: int, rank: int) -> list[Action]:
    """DualPipeV: forwards and backwards meet, so that the communication of the one hides in the other."""
    del chunks
    simulated = max(microbatches, 2 * pipeline)
    order = _VOrder(pipeline, rank)
    behind = pipeline - 1 - rank
    for _ in range(2 * behind):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(behind):
        order.backward(1, split=True)
        order.weights()
        order.forward(1)
    for _ in range(simulated - 2 * pipeline + rank + 1):
        order.forward(0)
        order.backward(1)
        order.forward(1)
        order.backward(0)
    for _ in range(behind):
        order.backward(1)
        order.forward(1)
        order.backward(0)
    # The second half of the last backwards is split, from a chunk on that alternates with the rank.
    first_split = (rank + 1) // 2 * 2 + (0 if rank % 2 else 1)
    for index in range(2 * (rank + 1)):
        order.backward(1 - index % 2, split=index >= first_split)
    for _ in range(behind):
        order.weights()
        order.backward(0, split=True)
    while order.put_off:
        order.weights()
    return order.actions


_ORDERS: dict[PricedSchedule, Callable[[int, int, int, int], Iterator[Action] | list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _one_forward_one_backward,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zero_bubble_2p": _zero_bubble_2p,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


# ── what an order costs ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything of a step happened.  All times in seconds from the step's start."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """Triples (action, start, end) of each rank."""

    @property
    def makespan_seconds(self) -> float:
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Busy time of each rank."""
        return tuple(sum(end - start for _, start, end in rank) for rank in self.spans)

    @property
    def bubble_seconds(self) -> float:
        """How much longer the step takes than the busiest rank works."""
        return self.makespan_seconds - max(self.busy_seconds, default=0.0)


def simulate(orders: Orders, cost_seconds: Callable[[Action], float], transfer_seconds: float = 0.0) -> Timeline:
    """Play the orders: every action starts once its rank is free and what it needs has arrived.

    `transfer_seconds` is added between stages on different ranks.  An order whose actions wait for one another in a
    circle, miss one or repeat one is a mistake of the generator (AssertionError).
    """
    num_stages = 1 + max((action.stage for rank in orders for action in rank), default=-1)
    rank_of = {action.stage: rank for rank, actions in enumerate(orders) for action in actions}
    done: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(orders):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                inputs = list(needs(action, num_stages))
                if any(need not in done for need in inputs):
                    break
                arrivals = [done[need] + (transfer_seconds if rank_of[need[1]] != rank else 0.0) for need in inputs]
                start = max([spans[rank][-1][2] if spans[rank] else 0.0, *arrivals])
                assert gives(action) not in done, f"{action} is done twice"
                done[gives(action)] = start + cost_seconds(action)
                spans[rank].append((action, start, done[gives(action)]))
                progress = True
    stuck = [str(actions[len(spans[rank])]) for rank, actions in enumerate(orders) if len(spans[rank]) < len(actions)]
    assert not stuck, f"actions wait for one another: {', '.join(stuck)}"
    return Timeline(tuple(tuple(rank) for rank in spans))


def peak_activations(orders: Orders) -> tuple[int, ...]:
    """Per rank, the most microbatches (counted per stage) whose activations are held at once."""
    peaks: list[int] = []
    for actions in orders:
        alive = peak = 0
        for action in actions:
            alive += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)
