"""What a trainer says of its buckets at the end of a run."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

from engine_kit import Training, plan_of, recipe_of

from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.config.plan import DataParallelPlan
from weft.events import Run
from weft.events.sinks.terminal import TerminalSink
from weft.run.engine import Trainer

PLAN = replace(plan_of(replicate=2), data_parallel=DataParallelPlan(zero=0))


class Remembers(Recorder):
    """Twelve steps of 0.2 s; in each two buckets, of which the second is reduced in 0.1 s after backward."""

    def latest(self) -> list[tuple[str, int, int]]:
        return [("forward_backward", (1 + step) * 200_000_000, 80_000_000) for step in range(12)]

    def remember(self) -> None:
        for _, start, _ in self.latest():
            for size, launched, took in ((1 << 20, 4_000_000, 2_000_000), (20 << 20, 80_000_000, 100_000_000)):
                seen = TraceEvent("data", "all_reduce", size)
                seen.launched_ns = start + launched
                seen.done(seen.launched_ns + took)
                seen.exposed_ns, seen.wait_exited_ns = took if launched == 80_000_000 else 0, seen.done_ns
                self.collectives.add(seen)
        self.collectives.end_step()


def say() -> str:
    """What rank 0 prints in a run of two steps that remembers others."""
    training, recorder, stream = Training(recipe_of(steps=2), PLAN), Remembers(), io.StringIO()
    recorder.remember()
    trainer = Trainer(
        training.recipe, training.state, training.data, training.mesh, recorder,
        checkpointer=None, run=Run(training.mesh.rank, [TerminalSink(stream)]),
    )  # fmt: skip
    trainer.run()
    return stream.getvalue()


def test_the_last_line_has_the_bucket_that_would_have_been_better(ranks: Any) -> None:
    messages = [line for line in ranks.run(2, say)[0].splitlines() if line.startswith("data axis: ")]
    assert len(messages) == 1
    # The share exposed is 100 ms by the script above; the second figure carries the few ms that joining took.
    assert re.match(r"data axis: 100 ms of 1\d\d ms exposed in a step; buckets of ", messages[0]), messages[0]
    assert "--set plan.data_parallel.bucket_bytes=" in messages[0]
    assert 0 < int(messages[0].rpartition("=")[2]) < 20 << 20
