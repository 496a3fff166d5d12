"""Schedules on unequal stages, played action by action: an action starts when its rank is free and what it needs has
arrived.  A played step of many microbatches repeats itself, so a few rounds are played and the rest is added."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

from weft.techniques.pipeline.cost import LONG, PipelineTimes, StageTimes, alone, busiest
from weft.techniques.pipeline.orders import Action, schedule_streams
from weft.techniques.pipeline.schedules import PricedSchedule, stage_ranks


class _Program(NamedTuple):
    """Orders as one list of actions in which everything comes after what it needs, a row each; in columns, since so
    many small objects would keep the garbage collector busy (a seventh of the search for 16,384 devices)."""

    costs: list[int]
    """Position of each action's seconds: its kind's place in `_COSTS` times the stages, plus its stage."""
    ranks: list[int]
    befores: list[int]
    """Row of the action that it waits for, or -1."""
    remote: list[bool]
    """Whether that action is on another rank."""
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
            return alone(microbatches, times)
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
        period = max((long.seconds - short.seconds) / pipeline, busiest(schedule, pipeline, chunks, times))
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
    # One pass without a queue: rows stand in an order in which everything follows what it needs.
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
