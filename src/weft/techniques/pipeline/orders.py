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
    """Forward (F), full backward (B), gradients of the inputs (I), gradients of the weights (W)."""
    stage: int
    """Number of the stage, from the input on."""
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
    # Surplus microbatches of the next defined number are left out (see the module's docstring).
    return tuple(
        (action for action in order_of(pipeline, chunks, microbatches, rank) if action[2] < microbatches)
        for rank in range(pipeline)
    )


def forward_orders(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int) -> Orders:
    """Return every rank's actions for an evaluation: forwards only, in rounds of as many microbatches as ranks."""
    check_schedule(schedule, pipeline, chunks)
    ranks = stage_ranks(schedule, pipeline, chunks)
    # Rounds of `pipeline` microbatches: a chunk's round fills the pipeline once, before the next chunk takes the rank.
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
    """Yield the passes that must precede an action, on any rank: (kind, stage, microbatch); B counts as I."""
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
    """Return the pass that an action completes, as `needs` names it."""
    return ("I" if action.kind == "B" else action.kind), action.stage, action.microbatch


# ── the orders ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gpipe(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    del pipeline, chunks
    # All forwards, then all backwards: every microbatch's activations are alive at the turn.
    yield from (Action("F", rank, microbatch) for microbatch in range(microbatches))
    yield from (Action("B", rank, microbatch) for microbatch in range(microbatches))


def _rounds(pipeline: int, chunks: int, microbatches: int, rank: int, *, reverse: bool) -> list[tuple[int, int]]:
    """Return (stage, microbatch) interleaved: rounds of `pipeline` microbatches through one chunk after another."""
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
    # Warm-up: the first gradient of a rank comes back after pipeline − 1 − rank hops down and as many up.  One forward
    # per rank behind this one keeps it busy until then.  Interleaved, each hop carries one chunk of several, so the way
    # up costs another forward per hop, and all earlier chunks run a round first (arXiv 2104.04473, §2.2).
    ahead = (pipeline - 1 - rank) * (1 if chunks == 1 else 2) + (chunks - 1) * pipeline
    ahead = min(ahead, len(forwards))
    for forward in forwards[:ahead]:
        yield Action("F", *forward)
    # Steady state: each backward frees the activations that the next forward takes, so `ahead` + 1 stay alive.
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield Action("F", *forward)
        yield Action("B", *backward)
    # Cool-down: the backwards of the warm-up's forwards.
    for backward in backwards[len(forwards) - ahead :]:
        yield Action("B", *backward)


def _interleaved_zero_bubble(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """ZB-H1, interleaved: rank r postpones r weight passes, and runs them while it would wait at the end."""
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
        # The input gradient goes first: the stage before waits for it, and nobody waits for a weight gradient.
        yield Action("I", *backward)
        put_off.append(backward)
        # At most `rank` weight passes wait, so memory peaks as under 1F1B (arXiv 2401.10241, §3.1).
        if len(put_off) > rank or not steady:
            yield Action("W", *put_off.popleft())
    for weights in put_off:
        yield Action("W", *weights)


def _zero_bubble_2p(pipeline: int, chunks: int, microbatches: int, rank: int) -> Iterator[Action]:
    """ZB-H2: no waits but at the ends.  Every rank holds the activations of 2p − 1 microbatches.

    Early ranks fill the wait for the first gradient with forwards; late ranks fill the end with weight passes.
    """
    del chunks
    # Twice the forwards of 1F1B: the gradient's way down and up is 2 (p − 1 − rank) passes long.
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
    """Builds a V order as the papers write it: `forward(0)` is the next forward of the first chunk, and so on.

    The first chunk goes down the ranks and the second one back up, so a rank has stages r and 2p − 1 − r.
    """

    def __init__(self, pipeline: int, rank: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * pipeline - 1 - rank)
        self._done = {(kind, chunk): 0 for kind in "FI" for chunk in (0, 1)}
        self.put_off: deque[tuple[int, int]] = deque()
        """(chunk, microbatch) of the postponed weight passes, oldest first."""

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
        """Run the oldest postponed weight pass (of one chunk, if given); nothing happens if there is none."""
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
    # Fewer microbatches than 2p − 1 take the first actions of that many (arXiv 2405.15362, §4).
    simulated = max(microbatches, 2 * pipeline - 1)
    order = _VOrder(pipeline, rank)
    # Warm-up: a microbatch comes back up to rank r in the second chunk after 2 (p − r) − 1 passes.
    for _ in range(2 * (pipeline - rank) - 1):
        order.forward(0)
    for _ in range(rank):
        order.forward(1)
        order.forward(0)
    # The last stage is on rank 0: gradients come down the second chunk, and its W directly behind keeps memory flat.
    for _ in range(pipeline - rank):
        order.forward(1)
        order.backward(1, split=True)
        order.weights(1)
    # Steady state: one F, one I and one W of each chunk in turn, so no rank waits if the three take equally long.
    while order.count("F", 1) < simulated:
        if order.count("F", 0) < simulated:
            order.forward(0)
        order.backward(0, split=True)
        order.weights(0)
        order.forward(1)
        order.backward(1, split=True)
        order.weights(1)
    # Cool-down: input gradients, on which other ranks wait, before the weight passes that nobody waits for.
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
    behind = pipeline - 1 - rank  # ranks that the first chunk still passes
    # The eight phases of DualPipe's published schedule, of which DualPipeV is one half folded into a V.
    for _ in range(2 * behind):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(behind):
        order.backward(1, split=True)
        order.weights()
        order.forward(1)
    # Steady state: a forward of one chunk always stands beside a backward of the other, so that the messages of one
    # travel while the other computes.
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
    """The start and end of every action of a step, in seconds from the step's start."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """Triples (action, start, end) of each rank."""

    @property
    def makespan_seconds(self) -> float:
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(end - start for _, start, end in rank) for rank in self.spans)

    @property
    def bubble_seconds(self) -> float:
        """Seconds by which the step takes longer than the busiest rank computes."""
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
    # Each sweep lets every rank run until it meets an action whose input is not done.  A sweep without progress means
    # that all are done, or that they wait in a circle; start times do not depend on the order of the sweeps.
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
    """Return, per rank, the most (stage, microbatch) pairs whose activations are alive at once."""
    peaks: list[int] = []
    for actions in orders:
        alive = peak = 0
        for action in actions:
            # An input pass frees nothing: the weight pass still reads the same activations.
            alive += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)
