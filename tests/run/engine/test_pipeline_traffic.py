"""A pipelined training step as it is seen: every activation and gradient that passes, with all its times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_kit import BATCH, Training, plan_of, recipe_of

from weft.comm.telemetry import CollectiveLog
from weft.comm.trace_event import TraceEvent


def _second_step() -> tuple[Counter[tuple[str, int]], int]:
    """Messages of a step by kind and bytes, and how many collectives of the axis a record counts in it."""
    training = Training(recipe_of(), plan_of(pipeline=2, micro=2))
    training.step(0)  # in which the shapes are told
    results: list[TraceEvent] = []
    log = CollectiveLog()
    training.mesh.watch(lambda seen: (results.append(seen), log.add(seen)))
    training.step(1)
    messages = [seen for seen in results if seen.operation in ("send", "receive")]
    for seen in messages:
        assert seen.axis == "pipeline"
        assert 0 < seen.launched_ns <= seen.wait_entered_ns <= seen.wait_exited_ns
        assert seen.launched_ns <= seen.done_ns <= seen.wait_exited_ns
    training.state.close()
    return Counter((seen.operation, seen.num_bytes) for seen in messages), log.end_step()["pipeline"].count


@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
def test_every_message_of_a_step_is_seen_under_its_axis(ranks: Any, backend: str) -> None:
    activation_bytes = 2 * 10 * 16 * 8  # samples, tokens, hidden size, fp64
    count = BATCH // 2
    for seen, recorded in ranks.run(2, _second_step, backend=backend):
        assert seen == {("send", activation_bytes): count, ("receive", activation_bytes): count}
        assert recorded >= 2 * count
