"""What is said of gradient buckets after a run, against steps played collective by collective with a known link."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.config.plan import DataParallelPlan, MeshPlan, Plan
from weft.techniques.buckets.advice import BucketAdvice, advise_bucket, fit_line

MEBI = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Seconds of a step, its link, and the gradients in it."""

    start: float
    per_byte: float
    size: int = 64 * MEBI
    backward: float = 0.4
    rest: float = 0.3
    observed: bool = True

    def took(self, num_bytes: int) -> float:
        return self.start + self.per_byte * num_bytes

    def step(self, bucket: int, first: int, began: float, zero: int) -> tuple[list[TraceEvent], float, float]:
        """Collectives of a step that begins at `began` with its backward; exposed seconds; when the next one begins."""
        kind = "reduce_scatter" if zero else "all_reduce"
        found, sizes, ended, filled = list[TraceEvent](), list[int](), 0.0, 0
        while filled < self.size:
            sizes.append(min(bucket if filled else min(first, bucket), self.size - filled))
            filled += sizes[-1]
            ready = began + self.backward * filled / self.size
            ended = max(ready, ended) + self.took(sizes[-1])
            found.append(self._seen(kind, sizes[-1], ready, ended))
        stop = began + self.backward
        found[-1].exposed_ns = int(max(0.0, ended - stop) * 1e9)
        now = self._gather(found, sizes, max(stop, ended) + 1e-6) if zero else max(stop, ended)
        return found, sum(each.exposed_ns for each in found) / 1e9, now + self.rest

    def _gather(self, found: list[TraceEvent], sizes: list[int], began: float) -> float:
        """The forward that reads gathered weights while later ones are on their way; returns its end."""
        now = ended = began
        for each in reversed(sizes):
            ended += self.took(each)
            found.append(self._seen("all_gather", each, began, ended))
            found[-1].exposed_ns = int(max(0.0, ended - now) * 1e9)
            now = max(now, ended) + self.backward / 2 * each / self.size
        return now

    def _seen(self, kind: str, num_bytes: int, launched: float, ended: float) -> TraceEvent:
        seen = TraceEvent("data", kind, num_bytes)  # pyright: ignore[reportArgumentType]
        seen.launched_ns = int(launched * 1e9)
        seen.wait_exited_ns = int(ended * 1e9)
        seen.done(int(ended * 1e9))
        seen.is_done_exact = self.observed
        return seen


class Played(Recorder):
    """A recorder of steps that were played."""

    def __init__(self, machine: Machine, plan: Plan, steps: int) -> None:
        super().__init__()
        data, now = plan.data_parallel, 1.0
        self.spans: list[tuple[str, int, int]] = []
        self.exposed = 0.0
        for _ in range(steps):
            self.spans.append(("forward_backward", int(now * 1e9), int(machine.backward * 1e9)))
            seen, self.exposed, now = machine.step(data.bucket_bytes, data.first_bucket_bytes, now, data.zero)
            for each in seen:
                self.collectives.add(each)
        self.collectives.end_step()

    def latest(self) -> list[tuple[str, int, int]]:
        return self.spans


def plan_of(bucket: int = 25 * MEBI, **changes: object) -> Plan:
    data = {"zero": 0, "bucket_bytes": bucket, **changes}
    return Plan(mesh=MeshPlan(replicate=2), data_parallel=DataParallelPlan(**data))  # type: ignore[arg-type]


def exposed_with(machine: Machine, bucket: int, zero: int) -> float:
    return machine.step(bucket, MEBI, 1.0, zero)[1]


FAST = Machine(start=2e-4, per_byte=5e-9)
"""Keeps up with backward: only the tail is waited for."""
SLOW = Machine(start=4e-3, per_byte=9e-9)
"""Does not: what is waited for is its whole time, and every start."""


def advised(machine: Machine, plan: Plan, steps: int = 20, **tail: int) -> BucketAdvice | None:
    return advise_bucket(Played(machine, plan, steps), plan, **tail)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("machine", "bucket"), [(FAST, 25 * MEBI), (FAST, 60 * MEBI), (SLOW, 290_000)])
def test_the_advised_bucket_exposes_what_was_said(machine: Machine, bucket: int, zero: int) -> None:
    advice = advised(machine, plan_of(bucket, zero=zero))
    assert advice is not None
    assert advice.exposed_seconds == pytest.approx(exposed_with(machine, bucket, zero), rel=1e-3)
    found = exposed_with(machine, advice.best_bytes, zero)
    assert found < 0.8 * advice.exposed_seconds
    assert found == pytest.approx(advice.would_expose_seconds, abs=0.15 * advice.exposed_seconds)
    least = min(exposed_with(machine, int(2 ** (18 + step / 8)), zero) for step in range(64))
    assert found <= least + 0.1 * advice.exposed_seconds


def test_the_line_has_figures_and_the_setting() -> None:
    advice = advised(FAST, plan_of())
    assert advice is not None
    assert str(replace(advice, total_seconds=0.531, exposed_seconds=0.212, best_bytes=4 * MEBI)).startswith(
        "data axis: 212 ms of 531 ms exposed in a step; buckets of 4 MiB would expose about "
    )
    assert str(advice).endswith(f"--set plan.data_parallel.bucket_bytes={advice.best_bytes}")


def test_nothing_is_said_where_little_is_known_or_to_be_won() -> None:
    good = advised(FAST, plan_of())
    assert good is not None
    assert advised(FAST, plan_of(good.best_bytes)) is None  # nothing is left to win
    assert advised(FAST, plan_of(), steps=7) is None
    assert advised(replace(FAST, observed=False), plan_of()) is None
    assert advised(FAST, plan_of(first_bucket_bytes=24 * MEBI)) is None  # none may be smaller than the first
    assert advised(replace(FAST, rest=20.0), plan_of()) is None  # 1 % of the step
    assert advised(FAST, replace(plan_of(), data_parallel=DataParallelPlan(zero=3))) is None


def test_a_large_embedding_is_waited_for_whatever_the_buckets() -> None:
    assert advised(FAST, plan_of(), tail_bytes=25 * MEBI) is None


def test_collectives_that_are_no_buckets_do_not_count() -> None:
    plan = plan_of()
    recorder = Played(FAST, plan, 20)
    for start in (span[1] for span in recorder.spans):
        small = TraceEvent("data", "all_reduce", 64)
        small.launched_ns = start + 5
        small.done(start + 10**9)
        small.exit_wait(small.enter_wait())
        recorder.collectives.add(small)
    recorder.collectives.end_step()
    assert advise_bucket(recorder, plan) == advised(FAST, plan)


def test_a_line_through_times_of_sizes() -> None:
    exact = [(size, 1e-3 + 2e-9 * size) for size in (MEBI, 4 * MEBI, 25 * MEBI)]
    assert fit_line(exact) == pytest.approx((1e-3, 2e-9))
    assert fit_line([*exact, (MEBI, 5.0), (MEBI, exact[0][1])]) == pytest.approx((1e-3, 2e-9))  # one was disturbed
    assert fit_line([(MEBI, 1e-3), (4 * MEBI, 5e-3)]) == pytest.approx((0.0, 1.0467e-9), rel=0.001)
    assert fit_line([(MEBI, 2e-3), (2 * MEBI, 1e-3)]) == pytest.approx((1.2e-3, 0.0))
    assert fit_line([(MEBI, 1e-3), (MEBI + 8, 1e-3)]) is None
    assert fit_line([]) is None
