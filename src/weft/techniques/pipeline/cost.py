"""What a pipeline costs: steps in closed form, what they cannot go below, and the activations that wait.

The closed forms are those of the papers that `weft.techniques.pipeline.schedules` names, with the largest rank in place
of equal ones; for 1F1B the time of one microbatch in the steady state is the largest mean over neighbouring stages of
their work and of the transfers between them, for a rank's forward waits for the backward of the microbatch that went
ahead of it.  What takes columns (`weft.vectorized`) says so of many pipelines at once, for the bounds of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, PricedSchedule, stage_ranks
from weft.vectorized import Column, chosen, larger, smaller

LONG = 4
"""Rounds of `pipeline` microbatches that are played before the rest is added."""
FOLDED: frozenset[PricedSchedule] = frozenset({"zbv", "dualpipev"})
"""Schedules whose ranks have a stage of either half, so that the first has both ends of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch in each stage."""

    forward: Sequence[float]
    input: Sequence[float]
    """Backward up to the gradient of the input, recomputation included."""
    weight: Sequence[float]
    transfer: float = 0.0
    """Seconds from a stage to the next one on another rank."""


class PipelineTimes(NamedTuple):
    """The length of a step's pipeline, and the ranks' idle time at its end."""

    seconds: float
    slack: Sequence[float]
    """Seconds before the end at which a rank has done its last action, by rank."""


def closed_form(
    schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
) -> PipelineTimes:
    """Return the step without playing it; for at least twice as many microbatches as ranks, else a little too long."""
    if pipeline == 1:
        return alone(microbatches, times)
    forward, inputs, weight, hop = times.forward, times.input, times.weight, times.transfer
    both = [inner + outer for inner, outer in zip(inputs, weight, strict=True)]
    hops = 2.0 * (pipeline * chunks - 1) * hop
    if schedule == "gpipe":
        flows = (sum(stage) + (microbatches - 1) * max(stage) for stage in (forward, both))
        return PipelineTimes(sum(flows) + hops, _slacks(pipeline, both, hop))
    if schedule == "1f1b":
        work = [ahead + back for ahead, back in zip(forward, both, strict=True)]
        period = _slowest_window(work, 2.0 * hop)
        return PipelineTimes(sum(work) + hops + (microbatches - 1) * period, _slacks(pipeline, both, hop))
    stages = len(forward)
    means = [sum(part) / stages for part in (forward, inputs, weight)]
    wait = max(0.0, bubble_seconds(schedule, pipeline, *means))
    slack = [0.0] * pipeline if schedule in SPLIT_BACKWARD else _slacks(pipeline, both, hop)
    back = inputs if schedule in SPLIT_BACKWARD else both
    work = [one + other for one, other in zip(forward, back, strict=True)]
    # The first microbatch passes all stages, and the others follow it through the slowest.  Where backward is split and
    # the pipeline never fills, the weights of the first stage come after all that.
    passing = sum(work) + (microbatches - 1) * max(work)
    if schedule in SPLIT_BACKWARD and microbatches < pipeline:
        passing += weight[0]
    last = last_round_seconds(schedule, pipeline, chunks, microbatches, *means)
    filled = microbatches * busiest(schedule, pipeline, chunks, times) + wait
    return PipelineTimes(max(filled, passing, last) + hops, slack)


class ScheduleShares(NamedTuple):
    """Which shares of its closed form a schedule was not found to fall short of as it is played."""

    equal: Column
    """Share with equal stages; of unequal ones as much less as the mean stage is below the slowest."""
    any: Column
    """Share with any stages."""
    short: Column
    """Share with any stages, and fewer microbatches than ranks."""
    long: Column
    """Share with any stages, and at least `LONG` times as many microbatches as ranks."""


def shares_of_closed_form(schedule: PricedSchedule, pipeline: int) -> ScheduleShares:
    """Return the least of 12,000 drawn schedules and 1,800 drawn models, 2026-11: closed forms know least of two ranks
    that wait for one another."""
    if schedule == "interleaved_zero_bubble":
        if pipeline == 2:
            return ScheduleShares(0.92, 0.76, 0.65, 0.92)
        return ScheduleShares(0.96, 0.8, 0.64, 0.96) if pipeline < 9 else ScheduleShares(0.97, 0.9, 0.75, 0.97)
    if pipeline < 5:
        return ScheduleShares(0.96, 0.85, 0.84, 0.94) if pipeline == 2 else ScheduleShares(0.965, 0.85, 0.84, 0.965)
    return ScheduleShares(0.97, 0.88, 0.88, 0.96) if pipeline < 9 else ScheduleShares(0.975, 0.95, 0.95, 0.975)


def balance_of(times: StageTimes) -> float:
    """Return the seconds of one microbatch on the mean stage over those on the slowest."""
    work = [sum(passes) for passes in zip(times.forward, times.input, times.weight, strict=True)]
    return sum(work) / len(work) / max(work)


def least_share(shares: ScheduleShares, balance: Column, pipeline: Column, microbatches: Column) -> Column:
    """Return the share of a step's closed form that bounds it as it is played.

    Args:
        balance: seconds of the mean stage over those of the slowest.
    """
    equal, least, short, long = shares
    share = larger(equal * balance, chosen(microbatches < pipeline, short, least))
    return chosen(microbatches >= LONG * pipeline, larger(share, long), share)


def _slowest_window(work: Sequence[float], hop: float) -> float:
    """Return the largest mean over runs of neighbouring stages of their work and the transfers between them.

    Under 1F1B neighbours wait for one another's activations and gradients, so a slow stage with slow neighbours sets
    the period, and not always the slowest stage alone.
    """
    mean = sum(work) / len(work) + hop * (len(work) - 1) / len(work)
    slowest = max(work)
    if hop == 0.0 or mean >= slowest + hop * (len(work) - 1) / len(work):
        return max(slowest, mean)
    best = max(slowest, mean)
    top = [index for index, value in enumerate(work) if value == slowest]
    # The best window holds a slowest stage; growing from the first and the last of them finds it or one as good.
    for start in {top[0], top[-1]}:
        low = high = start
        total = work[start]
        while low > 0 or high < len(work) - 1:
            below = work[low - 1] if low > 0 else -1.0
            above = work[high + 1] if high < len(work) - 1 else -1.0
            total += max(below, above) + hop
            if above >= below:
                high += 1
            else:
                low -= 1
            best = max(best, total / (high - low + 1))
    return best


def busy_seconds(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes) -> float:
    """Return the seconds of a rank's own passes with what must come before its first and after its last, of the rank
    for which that is longest: no order of the schedule's actions is shorter.

    Rank r begins with the first forward that reaches stage r, and the stages before r have their backwards after its
    last one there.  Where gradients of weights are put off, only those of inputs need do so, and r puts off no more
    than its own; under the interleaved zero bubble schedule, no more than r + 1 of them at a time.
    """
    busy, apart, largest = [0.0] * pipeline, [0.0] * pipeline, [0.0] * pipeline
    rows = zip(stage_ranks(schedule, pipeline, chunks), times.forward, times.input, times.weight, strict=True)
    for rank, forward, inputs, weight in rows:
        busy[rank] += forward + inputs
        apart[rank] += weight
        largest[rank] = max(largest[rank], weight)
    splits = schedule in SPLIT_BACKWARD
    longest = ahead = behind = 0.0
    for rank in range(pipeline):
        own, owed = microbatches * busy[rank], microbatches * apart[rank]
        put_off = owed if splits else 0.0
        if schedule == "interleaved_zero_bubble":
            put_off = min(owed, (rank + 1) * largest[rank])
        longest = max(longest, ahead + own + owed + max(0.0, behind - put_off))
        ahead += times.forward[rank] + times.transfer
        behind += times.input[rank] + times.transfer + (0.0 if splits else times.weight[rank])
    return longest


def busiest(schedule: PricedSchedule, pipeline: int, chunks: int, times: StageTimes) -> float:
    """Return the seconds that the busiest rank computes for one microbatch."""
    busy = [0.0] * pipeline
    rows = zip(stage_ranks(schedule, pipeline, chunks), times.forward, times.input, times.weight, strict=True)
    for rank, forward, inputs, weight in rows:
        busy[rank] += forward + inputs + weight
    return max(busy)


def _slacks(pipeline: int, both: Sequence[float], hop: float) -> list[float]:
    """Return the seconds by which each rank ends early: the backwards of the ranks before it follow its own."""
    slack, before = [0.0], 0.0
    for rank in range(pipeline - 1):
        before += both[rank] + hop
        slack.append(before)
    return slack


def alone(microbatches: int, times: StageTimes) -> PipelineTimes:
    one = sum(times.forward) + sum(times.input) + sum(times.weight)
    return PipelineTimes(microbatches * one, [0.0])


def bubble_seconds(
    schedule: PricedSchedule, pipeline: Column, forward_seconds: Column, input_seconds: Column, weight_seconds: Column
) -> Column:
    """The bubble of a step for equal stages whose passes take these times, communication left out.

    Per *stage*: with chunks, a rank's times are so many times larger and the bubble relatively smaller.  It holds for
    at least twice as many microbatches as ranks; for the split schedules while the weight pass is no longer than the
    others, for the V-shaped ones when all three passes are about equal (their papers' assumption; else `simulate`).
    DualPipeV is taken as run here, with forward and backward one after the other; the published
    (p/2 − 1)(F&B + B − 3W) counts an overlapped pair as one pass.
    """
    ranks = pipeline - 1
    if schedule == "zbv":
        return ranks * larger(larger(forward_seconds, input_seconds), weight_seconds)
    if schedule == "zero_bubble_2p":
        return ranks * larger(0.0, forward_seconds + input_seconds - 2 * weight_seconds)
    if schedule in ("interleaved_zero_bubble", "dualpipev"):
        return ranks * (forward_seconds + input_seconds - weight_seconds)
    return ranks * (forward_seconds + input_seconds + weight_seconds)


def last_round_seconds(
    schedule: PricedSchedule,
    pipeline: Column,
    chunks: Column,
    microbatches: Column,
    forward_seconds: Column,
    input_seconds: Column,
    weight_seconds: Column,
) -> Column:
    """What a step of an interleaved schedule takes at least, where its last round has fewer microbatches than ranks.

    Before the last rank begins the last backward of all, it has done all forwards, and the backwards but those of the
    last round's other chunks; then that backward passes every stage.  A round of r microbatches so costs
    (p − r)(v − 1) backwards of a stage more than a full one.  Where weight passes are put off, the last rank may owe
    as many as its number, and the first stage's comes after all.  Seconds are those of equal stages; 0 for schedules
    without rounds.
    """
    if schedule not in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return 0.0
    last = (microbatches - 1) % pipeline + 1
    before = (microbatches - last) * chunks + last - 1
    backward = input_seconds + weight_seconds
    seconds = (pipeline - 1 + microbatches * chunks) * forward_seconds + before * backward
    if schedule == "interleaved_1f1b":
        return seconds + pipeline * chunks * backward
    owed = smaller(pipeline - 1, before) * weight_seconds
    return seconds - owed + pipeline * chunks * input_seconds + weight_seconds


# ── activations that wait ─────────────────────────────────────────────────────────────────────────────────────────────


def in_flight(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, rank: int) -> tuple[int, ...]:
    """Return, for each of the rank's chunks, the microbatches whose activations wait at the fullest moment.

    Their sum is what `peak_activations` finds in the schedule's orders.
    """
    if pipeline == 1:
        return (1,) * chunks
    if schedule == "gpipe":
        return (microbatches,)
    if schedule in FOLDED:
        return _folded(schedule, pipeline, microbatches, rank)
    whole, rest = divmod(_waiting_passes(schedule, pipeline, chunks, rank), pipeline * chunks)
    # Passes go to chunks as interleaving does it: `pipeline` microbatches of a chunk, then of the next.
    extras = (min(pipeline, max(0, rest - chunk * pipeline)) for chunk in range(chunks))
    return tuple(min(whole * pipeline + extra, microbatches) for extra in extras)


def flights(
    schedule: PricedSchedule, pipeline: Column, chunks: Column, microbatches: Column, rank: Column
) -> tuple[Column, Column]:
    """Return the microbatches of `in_flight` in the mean over a rank's chunks, and in the chunk that has fewest; of
    folded schedules, in the first chunk and in the second."""
    if schedule == "gpipe":
        return 1.0 * microbatches, 1.0 * microbatches
    if schedule in FOLDED:
        return _folded(schedule, pipeline, microbatches, rank)
    waiting = _waiting_passes(schedule, pipeline, chunks, rank)
    whole, rest = waiting // (pipeline * chunks), waiting % (pipeline * chunks)
    full, part = rest // pipeline, rest % pipeline
    more, some, fewer = (smaller(whole * pipeline + extra, microbatches) for extra in (pipeline, part, 0))
    total = full * more + some + (chunks - full - 1) * fewer
    return total / chunks, chosen(full == chunks - 1, some, fewer)


def _waiting_passes(schedule: PricedSchedule, pipeline: Column, chunks: Column, rank: Column) -> Column:
    """Return the forwards that a rank has done, over all its chunks, when its first backward begins."""
    ahead = pipeline - 1 - rank
    if schedule == "interleaved_zero_bubble":
        # Weight passes that are put off keep their activations: as many as the rank's number.
        return ahead + (chunks - 1) * pipeline + 1 + rank
    if schedule == "zero_bubble_2p":
        return 2 * pipeline - 1
    return ahead * chosen(chunks == 1, 1, 2) + (chunks - 1) * pipeline + 1


def _folded(schedule: PricedSchedule, pipeline: Column, microbatches: Column, rank: Column) -> tuple[Column, Column]:
    """Return the microbatches in flight in the first chunk (down) and in the second one (up) of a folded schedule."""
    return smaller(2 * pipeline - rank - (schedule == "zbv"), microbatches), smaller(rank + 1, microbatches)
