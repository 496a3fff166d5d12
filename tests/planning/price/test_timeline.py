"""Schedules on unequal stages: the bubbles of the papers, and closed forms beside the played schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.techniques.pipeline.cost import StageTimes, closed_form
from weft.techniques.pipeline.orders import schedule_orders as orders_of
from weft.techniques.pipeline.orders import simulate
from weft.techniques.pipeline.schedules import Schedule
from weft.techniques.pipeline.timeline import Timelines

TIMELINES = Timelines()
SHAPES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
costs = st.floats(min_value=0.5, max_value=2.0)


def equal(pipeline: int, chunks: int, forward: float, inputs: float, weight: float) -> StageTimes:
    stages = pipeline * chunks
    return StageTimes(forward=[forward] * stages, input=[inputs] * stages, weight=[weight] * stages)


@given(pipeline=st.integers(2, 8), rounds=st.integers(2, 6), forward=costs, inputs=costs, weight=costs)
@settings(max_examples=15, deadline=None)
def test_the_bubble_of_equal_stages_is_exactly_that_of_the_papers(
    pipeline: int, rounds: int, forward: float, inputs: float, weight: float
) -> None:
    microbatches = rounds * pipeline
    whole = forward + inputs + weight
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)):
        times = equal(pipeline, chunks, forward, inputs, weight)
        busy = microbatches * chunks * whole
        expected = busy + (pipeline - 1) * whole
        for step in (TIMELINES.play, closed_form):
            seconds = step(schedule, pipeline, chunks, microbatches, times).seconds  # type: ignore[arg-type]
            assert seconds == pytest.approx(expected)
            share = 1 - busy / seconds
            assert share == pytest.approx((pipeline - 1) / (chunks * microbatches + pipeline - 1))


@given(pipeline=st.integers(2, 8), rounds=st.integers(2, 5), hop=st.floats(0.0, 0.1))
@settings(max_examples=20, deadline=None)
def test_a_pipeline_filled_twice_has_no_bubble(pipeline: int, rounds: int, hop: float) -> None:
    microbatches = rounds * pipeline
    times = replace(equal(pipeline, 1, 1.0, 1.0, 1.0), transfer=hop)
    for step in (TIMELINES.play, closed_form):
        seconds = step("zero_bubble_2p", pipeline, 1, microbatches, times).seconds
        assert 3.0 * microbatches - 1e-9 <= seconds <= 3.0 * microbatches + 2 * (pipeline - 1) * hop + 1e-9


@given(pipeline=st.integers(2, 8), rounds=st.integers(2, 5))
@settings(max_examples=20, deadline=None)
def test_split_backwards_leave_a_third_of_the_bubble_or_a_chunk_of_it(pipeline: int, rounds: int) -> None:
    microbatches = rounds * pipeline
    for schedule, chunks in (("interleaved_zero_bubble", 1), ("interleaved_zero_bubble", 2), ("zbv", 2)):
        times = equal(pipeline, chunks, 1.0, 1.0, 1.0)
        expected = 3.0 * chunks * microbatches + (pipeline - 1)
        assert TIMELINES.play(schedule, pipeline, chunks, microbatches, times).seconds == pytest.approx(expected)  # type: ignore[arg-type]
        assert closed_form(schedule, pipeline, chunks, microbatches, times).seconds == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
def test_playing_agrees_with_the_simulation_of_the_plan_room(schedule: Schedule, chunks: int) -> None:
    pipeline, microbatches, hop = 4, 11, 0.07
    stages = pipeline * chunks
    forward = [1.0 + 0.1 * stage for stage in range(stages)]
    inputs = [1.3 - 0.05 * stage for stage in range(stages)]
    weight = [0.8 + 0.03 * (stage % 3) for stage in range(stages)]
    times = StageTimes(forward=forward, input=inputs, weight=weight, transfer=hop)

    def cost(action: object) -> float:
        kind, stage, _ = action  # type: ignore[misc]
        return {"F": forward, "I": inputs, "W": weight}.get(kind, [a + b for a, b in zip(inputs, weight)])[stage]  # type: ignore[has-type]  # noqa: B905

    expected = simulate(orders_of(schedule, pipeline, chunks, microbatches), cost, hop).makespan_seconds
    spans = TIMELINES.spans(schedule, pipeline, chunks, microbatches, times)
    assert max(stop for _, _, _, stop in spans) == pytest.approx(expected)
    assert TIMELINES.play(schedule, pipeline, chunks, microbatches, times).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
def test_many_microbatches_are_played_by_few_and_a_period(schedule: Schedule, chunks: int) -> None:
    pipeline, microbatches = 4, 60
    stages = pipeline * chunks
    ends = [1.4 if stage in (0, stages - 1) else 1.0 for stage in range(stages)]
    times = StageTimes(forward=ends, input=ends, weight=ends, transfer=0.02)
    whole = max(stop for _, _, _, stop in TIMELINES.spans(schedule, pipeline, chunks, microbatches, times))
    assert TIMELINES.play(schedule, pipeline, chunks, microbatches, times).seconds == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_closed_forms_are_close_to_the_played_schedule(schedule: Schedule, chunks: int, data: st.DataObject) -> None:
    pipeline = data.draw(st.integers(2, 8), label="pipeline")
    microbatches = pipeline * data.draw(st.integers(4, 8), label="rounds")
    stages = pipeline * chunks
    first = data.draw(st.floats(1.0, 1.3), label="stem")
    last = data.draw(st.floats(1.0, 1.3), label="tail")
    hop = data.draw(st.floats(0.0, 0.05), label="hop")
    work = [first, *[1.0] * (stages - 2), last]
    times = StageTimes(forward=work, input=work, weight=work, transfer=hop)
    played = TIMELINES.play(schedule, pipeline, chunks, microbatches, times).seconds
    assert closed_form(schedule, pipeline, chunks, microbatches, times).seconds == pytest.approx(played, rel=0.06)


@given(work=st.lists(costs, min_size=2, max_size=8), slower=st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_no_stage_gets_faster_by_slowing_another(work: list[float], slower: int) -> None:
    place = slower % len(work)
    more = [cost * (1.5 if index == place else 1.0) for index, cost in enumerate(work)]
    shape = ("1f1b", len(work), 1, 3 * len(work))
    for step in (TIMELINES.play, closed_form):
        before = step(*shape, StageTimes(forward=work, input=work, weight=work)).seconds  # type: ignore[arg-type]
        assert step(*shape, StageTimes(forward=more, input=more, weight=more)).seconds >= before - 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
def test_slack_is_how_long_a_rank_waits_at_the_end(schedule: Schedule, chunks: int) -> None:
    pipeline, microbatches = 4, 12
    times = equal(pipeline, chunks, 1.0, 1.0, 1.0)
    spans = TIMELINES.spans(schedule, pipeline, chunks, microbatches, times)
    step = TIMELINES.play(schedule, pipeline, chunks, microbatches, times)
    for rank in range(pipeline):
        end = max(stop for other, _, _, stop in spans if other == rank)
        assert step.slack[rank] == pytest.approx(step.seconds - end)
