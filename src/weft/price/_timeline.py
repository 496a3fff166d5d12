"""How long a schedule takes on unequal stages: played action by action, and in closed form.

Played, an action starts when its rank is free and what it needs has arrived.  A played step of many microbatches
repeats itself, so a few rounds are played and the rest is added.  The closed forms are those of the papers that
`weft.plan` names, with the largest rank in place of equal ones; for 1F1B the time of one microbatch in the steady
state is the largest mean over neighbouring stages of their work and of the transfers between them, for a rank's
forward waits for the backward of the microbatch that went ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from weft.plan import (
    SPLIT_BACKWARD,
    Action,
    PricedSchedule,
    bubble_seconds,
    last_round_seconds,
    schedule_streams,
    stage_ranks,
)

LONG = 4
"""Rounds of `pipeline` microbatches that are played before the rest is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch in each stage."""

    forward: Sequence[float]
    input: Sequence[float]
    """Backward up to the gradient of the input, recomputation included."""
    weight: Sequence[float]
    transfer: float = 0.0
    """Time from a stage to the next one on another rank."""


class PipelineTimes(NamedTuple):
    """When a step's pipeline ends."""

    seconds: float
    slack: Sequence[float]
    """Time before the end at which each rank has done its last action."""


class _Program(NamedTuple):
    """Orders as one list of actions in which everything comes after what it needs, a row each; in columns, since so
    many small objects would keep the garbage collector busy (a seventh of the search for 16,384 devices)."""

    costs: list[int]
    """Position of each action's seconds: its kind's place in `_COSTS` times the stages, plus its stage."""
    ranks: list[int]
    befores: list[int]
    """The row that it waits for, or -1."""
    remote: list[bool]
    """Whether that lies on another rank."""
    microbatches: list[int]

    def actions(self, num_stages: int) -> Iterator[Action]:
        for cost, microbatch in zip(self.costs, self.microbatches, strict=True):
            yield Action(_COSTS[cost // num_stages], cost % num_stages, microbatch)


_COSTS: tuple[Literal["F", "B", "I", "W"], ...] = ("F", "B", "I", "W")
"""Kinds of actions in the order of `_costs_of`."""


class Timelines:
    """Plays schedules; keeps the orders that it has worked out."""

    def __init__(self) -> None:
        self._programs: dict[tuple[PricedSchedule, int, int, int], _Program] = {}
        self._steps: dict[tuple[object, ...], PipelineTimes] = {}

    def play(
        self, schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
    ) -> PipelineTimes:
        """Return the step by playing it; many microbatches by playing few and adding the others' period."""
        if pipeline == 1:
            return _alone(microbatches, times)
        passes = (tuple(times.forward), tuple(times.input), tuple(times.weight), times.transfer)
        key = (schedule, pipeline, chunks, microbatches, passes)
        if key not in self._steps:  # what is not sent between stages changes no schedule: ZeRO, buckets, most orders
            self._steps[key] = self._long(schedule, pipeline, chunks, microbatches, times)
        return self._steps[key]

    def _long(
        self, schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
    ) -> PipelineTimes:
        rounds = LONG * pipeline + microbatches % pipeline
        if microbatches <= rounds:
            return self._played(schedule, pipeline, chunks, microbatches, times)
        long = self._played(schedule, pipeline, chunks, rounds, times)
        short = self._played(schedule, pipeline, chunks, rounds - pipeline, times)
        # Before the steady state a rank may still catch up; in it, it never takes less than its own work.
        period = max((long.seconds - short.seconds) / pipeline, _busiest(schedule, pipeline, chunks, times))
        return PipelineTimes(long.seconds + period * (microbatches - rounds), long.slack)

    def spans(
        self, schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
    ) -> list[tuple[int, Action, float, float]]:
        """Return (rank, action, start, stop) of every action of a step."""
        if pipeline == 1:
            return _spans_alone(microbatches, times)
        program = self._program(schedule, pipeline, chunks, microbatches)
        done = _run(program, pipeline, times)[0]
        costs, actions = _costs_of(times), program.actions(pipeline * chunks)
        return [
            (rank, action, end - costs[cost], end)
            for cost, rank, action, end in zip(program.costs, program.ranks, actions, done, strict=True)
        ]

    def _played(
        self, schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
    ) -> PipelineTimes:
        _, free = _run(self._program(schedule, pipeline, chunks, microbatches), pipeline, times)
        if schedule == "zero_bubble_2p":
            # Ranks do not wait for one another at the end of a step: each takes from its own first action to its last.
            starts = [0.0, *accumulate(time + times.transfer for time in times.forward[:-1])]
            free = [stop - start for stop, start in zip(free, starts, strict=True)]
        end = max(free)
        return PipelineTimes(end, [end - stop for stop in free])

    def _program(self, schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int) -> _Program:
        key = (schedule, pipeline, chunks, microbatches)
        if key not in self._programs:
            self._programs[key] = _compile(*key)
        return self._programs[key]


def closed_form(
    schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int, times: StageTimes
) -> PipelineTimes:
    """Return the step without playing it; for at least twice as many microbatches as ranks, else a little too long."""
    if pipeline == 1:
        return _alone(microbatches, times)
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
    return PipelineTimes(
        max(microbatches * _busiest(schedule, pipeline, chunks, times) + wait, passing, last) + hops, slack
    )


class ScheduleShares(NamedTuple):
    """Which shares of its closed form a schedule was not found to fall short of as it is played."""

    equal: float
    """Share with equal stages; with unequal ones as much less as the mean stage is below the slowest."""
    any: float
    """Share with any stages."""
    short: float
    """Share with any stages, and fewer microbatches than ranks."""
    long: float
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


def least_share(schedule: PricedSchedule, pipeline: int, microbatches: int, times: StageTimes) -> float:
    """Return the share of a step's closed form that bounds it as it is played."""
    if pipeline == 1:
        return 1.0
    work = [sum(passes) for passes in zip(times.forward, times.input, times.weight, strict=True)]
    shares = shares_of_closed_form(schedule, pipeline)
    least = shares.any if microbatches >= pipeline else shares.short
    share = max(shares.equal * sum(work) / len(work) / max(work), least)
    return max(share, shares.long) if microbatches >= LONG * pipeline else share


def _slowest_window(work: Sequence[float], hop: float) -> float:
    """The largest mean of neighbours' work and of the transfers (there and back) between them."""
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


def _busiest(schedule: PricedSchedule, pipeline: int, chunks: int, times: StageTimes) -> float:
    """Seconds that one microbatch takes of the rank that works longest on it."""
    busy = [0.0] * pipeline
    rows = zip(stage_ranks(schedule, pipeline, chunks), times.forward, times.input, times.weight, strict=True)
    for rank, forward, inputs, weight in rows:
        busy[rank] += forward + inputs + weight
    return max(busy)


def _slacks(pipeline: int, both: Sequence[float], hop: float) -> list[float]:
    """Later ranks end earlier, by the backwards that follow theirs."""
    slack, before = [0.0], 0.0
    for rank in range(pipeline - 1):
        before += both[rank] + hop
        slack.append(before)
    return slack


def _alone(microbatches: int, times: StageTimes) -> PipelineTimes:
    one = sum(times.forward) + sum(times.input) + sum(times.weight)
    return PipelineTimes(microbatches * one, [0.0])


def _spans_alone(microbatches: int, times: StageTimes) -> list[tuple[int, Action, float, float]]:
    spans: list[tuple[int, Action, float, float]] = []
    now = 0.0
    forward, backward = sum(times.forward), sum(times.input) + sum(times.weight)
    for microbatch in range(microbatches):
        spans.append((0, Action("F", 0, microbatch), now, now + forward))
        spans.append((0, Action("B", 0, microbatch), now + forward, now + forward + backward))
        now += forward + backward
    return spans


def _costs_of(times: StageTimes) -> list[float]:
    both = [inner + outer for inner, outer in zip(times.input, times.weight, strict=True)]
    return [*times.forward, *both, *times.input, *times.weight]


def _run(program: _Program, pipeline: int, times: StageTimes) -> tuple[list[float], list[float]]:
    """Return the end of every row, and of every rank."""
    costs, hop = _costs_of(times), times.transfer
    free = [0.0] * pipeline
    done: list[float] = []
    append = done.append
    for cost, rank, before, remote in zip(program.costs, program.ranks, program.befores, program.remote, strict=True):
        start = free[rank]
        if before >= 0:
            arrival = done[before] + hop if remote else done[before]
            if arrival > start:
                start = arrival
        free[rank] = end = start + costs[cost]
        append(end)
    return done, free


def _compile(schedule: PricedSchedule, pipeline: int, chunks: int, microbatches: int) -> _Program:
    """Bring the orders of all ranks into one list."""
    streams = schedule_streams(schedule, pipeline, chunks, microbatches)
    ranks, stages = stage_ranks(schedule, pipeline, chunks), pipeline * chunks
    first_cost = {kind: place * stages for place, kind in enumerate(_COSTS)}
    # The row of what each stage has done of each microbatch, forward and backward; -1 before it has.
    forwards, backwards = ([-1] * (stages * microbatches) for _ in range(2))
    program = _Program([], [], [], [], [])
    add_cost, add_rank, add_before = program.costs.append, program.ranks.append, program.befores.append
    add_remote, add_microbatch = program.remote.append, program.microbatches.append
    following, count = [next(stream, None) for stream in streams], 0
    progress = True
    while progress:
        progress = False
        for rank, stream in enumerate(streams):
            while action := following[rank]:
                kind, stage, microbatch = action
                before, remote = -1, False
                if kind != "W":
                    done, neighbour = (forwards, stage - 1) if kind == "F" else (backwards, stage + 1)
                    if 0 <= neighbour < stages:
                        before, remote = done[neighbour * microbatches + microbatch], ranks[neighbour] != rank
                        if before < 0:
                            break  # what it waits for comes later, from another rank
                    done[stage * microbatches + microbatch] = count
                add_cost(first_cost[kind] + stage)
                add_rank(rank)
                add_before(before)
                add_remote(remote)
                add_microbatch(microbatch)
                following[rank] = next(stream, None)
                count += 1
                progress = True
    assert not any(following), "actions wait for one another"
    return program
