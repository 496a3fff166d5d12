"""Orders of actions: complete, free of circles, as fast and as small as their papers say; messages that never cross."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.techniques.pipeline.cost import bubble_seconds
from weft.techniques.pipeline.orders import Action, forward_orders, peak_activations, schedule_orders, simulate
from weft.techniques.pipeline.routes import StageMessage, plan_routes, sent_by, wanted_by
from weft.techniques.pipeline.schedules import Schedule, check_schedule, stage_ranks

CHUNKS: dict[Schedule, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4),
    "interleaved_zero_bubble": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}
CASES = [(schedule, chunks) for schedule, all_chunks in CHUNKS.items() for chunks in all_chunks]
Case = tuple[Schedule, int, int, int]
cases = st.sampled_from(CASES).flatmap(
    lambda case: st.tuples(st.just(case[0]), st.integers(2, 9), st.just(case[1]), st.integers(0, 40))
)


def seconds(action: Action) -> float:
    return 2.0 if action.kind == "B" else 1.0


@settings(max_examples=150, deadline=None)
@given(cases)
def test_every_action_once_and_no_circle(case: Case) -> None:
    schedule, pipeline, chunks, microbatches = case
    orders = schedule_orders(*case)
    ranks = stage_ranks(schedule, pipeline, chunks)
    done = Counter(action for actions in orders for action in actions)
    assert all(times == 1 for times in done.values())
    for stage in range(pipeline * chunks):
        for microbatch in range(microbatches):
            passes = "".join(kind for kind in "FBIW" if (kind, stage, microbatch) in done)
            assert passes in ("FB", "FIW")
    assert all(ranks[action.stage] == rank for rank, actions in enumerate(orders) for action in actions)
    simulate(orders, seconds)
    simulate(forward_orders(*case), seconds)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_the_last_backwards_of_a_rank_come_in_falling_order_of_its_parts(case: Case) -> None:
    """A Parameter that two parts of a rank share is complete with the lower one; ZeRO-3 and the buckets rely on it."""
    for actions in schedule_orders(*case):
        last = {action.stage: index for index, action in enumerate(actions) if action.kind in "BI"}
        assert [last[stage] for stage in sorted(last, reverse=True)] == sorted(last.values())


@settings(max_examples=100, deadline=None)
@given(cases)
def test_arrivals_prove_earlier_ones(case: Case) -> None:
    """Playing the orders with blocking receives in channel order never locks up, and nothing proves too much."""
    schedule, pipeline, chunks, _ = case
    orders, ranks = schedule_orders(*case), stage_ranks(schedule, pipeline, chunks)
    routes = [plan_routes(orders, ranks, rank) for rank in range(pipeline)]
    sent: set[StageMessage] = set()
    consumed: set[StageMessage] = set()
    proved: set[StageMessage] = set()
    for action in sorted_by_start(orders):
        wanted = wanted_by(action, len(ranks))
        if wanted is not None:
            assert wanted in sent
            consumed.add(wanted)
            for earlier in routes[ranks[action.stage]].proves.get(wanted, ()):
                assert earlier in consumed
                assert earlier not in proved
                proved.add(earlier)
        if (message := sent_by(action, len(ranks))) is not None:
            sent.add(message)
    assert sent == consumed


def sorted_by_start(orders: tuple[tuple[Action, ...], ...]) -> list[Action]:
    spans = [span for rank in simulate(orders, seconds).spans for span in rank]
    return [action for action, _, _ in sorted(spans, key=lambda span: (span[1], span[2]))]


@pytest.mark.parametrize("pipeline", [2, 4])
def test_sent_activations_are_let_go_in_one_forward_one_backward(pipeline: int) -> None:
    """What waits for a proof stays bounded however many microbatches there are."""
    orders, ranks = schedule_orders("1f1b", pipeline, 1, 50), tuple(range(pipeline))
    for rank, actions in enumerate(orders):
        routes, leaving, most = plan_routes(orders, ranks, rank), set[StageMessage](), 0
        for action in actions:
            if (wanted := wanted_by(action, pipeline)) is not None:
                leaving -= set(routes.proves.get(wanted, ()))
            if (sent := sent_by(action, pipeline)) is not None:
                leaving.add(sent)
            most = max(most, len(leaving))
        assert most <= 2 * pipeline + 1


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_bubbles_are_what_the_papers_say(schedule: Schedule, chunks: int, pipeline: int) -> None:
    orders = schedule_orders(schedule, pipeline, chunks, 4 * pipeline)
    timeline = simulate(orders, seconds)
    assert timeline.bubble_seconds == pytest.approx(bubble_seconds(schedule, pipeline, 1.0, 1.0, 1.0), rel=0.1)
    if schedule == "zbv":  # no waiting between a rank's first and last action
        for rank, busy in zip(timeline.spans, timeline.busy_seconds, strict=True):
            assert rank[-1][2] - rank[0][1] == pytest.approx(busy)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_unequal_passes_and_slow_links(pipeline: int) -> None:
    cost = {"F": 1.0, "I": 1.2, "W": 0.8, "B": 2.0}
    for schedule, chunks in CASES:
        timeline = simulate(schedule_orders(schedule, pipeline, chunks, 4 * pipeline), lambda action: cost[action.kind])
        if schedule not in ("zbv", "dualpipev"):
            assert timeline.bubble_seconds == pytest.approx(bubble_seconds(schedule, pipeline, 1.0, 1.2, 0.8), rel=0.1)
    orders = schedule_orders("1f1b", pipeline, 1, 8)
    assert simulate(orders, seconds, 0.5).makespan_seconds > simulate(orders, seconds).makespan_seconds


def test_activations_held_at_once() -> None:
    assert peak_activations(schedule_orders("gpipe", 4, 1, 12)) == (12, 12, 12, 12)
    assert peak_activations(schedule_orders("1f1b", 4, 1, 12)) == (4, 3, 2, 1)
    assert peak_activations(schedule_orders("zbv", 4, 2, 12)) == (8, 8, 8, 8)
    assert peak_activations(schedule_orders("interleaved_zero_bubble", 4, 1, 12)) == (4, 4, 4, 4)


@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_a_pipeline_filled_twice_never_waits(pipeline: int) -> None:
    """ZB-H2: between its first and last action no rank waits when the passes take equally long, at twice the memory."""
    for microbatches in (1, pipeline, 2 * pipeline - 1, 5 * pipeline):
        orders = schedule_orders("zero_bubble_2p", pipeline, 1, microbatches)
        timeline = simulate(orders, seconds)
        assert peak_activations(orders) == (min(2 * pipeline - 1, microbatches),) * pipeline
        if microbatches >= 2 * pipeline - 1:
            for rank, busy in zip(timeline.spans, timeline.busy_seconds, strict=True):
                assert rank[-1][2] - rank[0][1] == pytest.approx(busy)
    assert bubble_seconds("zero_bubble_2p", pipeline, 1.0, 1.2, 0.8) == pytest.approx(0.6 * (pipeline - 1))


def test_a_schedule_with_the_wrong_number_of_chunks() -> None:
    with pytest.raises(PlanError, match=r"chunks_per_rank = 3 does not fit schedule = \"zbv\": it has 2. Set"):
        schedule_orders("zbv", 4, 3, 8)
    with pytest.raises(PlanError, match=r"it has 2 or more. Set chunks_per_rank = 2"):
        check_schedule("interleaved_1f1b", 4, 1)
    with pytest.raises(PlanError, match=r"needs plan.mesh.pipeline of at least 2, not 1"):
        check_schedule("1f1b", 1, 1)
