"""Events: one order for all sinks, and no sink's fault is the run's."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
import timeit
import warnings
from pathlib import Path
from typing import Any

import pytest

from weft.events import (
    CollectiveEvent,
    Emitted,
    FailureEvent,
    MemoryEvent,
    MessageEvent,
    PhaseEvent,
    RateEvent,
    Run,
    StepEvent,
    WarningEvent,
    loggers_to,
)
from weft.events.sinks.log import LogSink
from weft.events.sinks.metrics import MetricsSink


class Heard:
    """Keeps what it hears; speaks and breaks when it is told to."""

    def __init__(self, run: Run | None = None, breaks_at: int | None = None) -> None:
        self.all = list[Emitted]()
        self.closed = 0
        self._run, self._breaks_at = run, breaks_at

    def take(self, emitted: Emitted) -> None:
        if emitted.number == self._breaks_at:
            raise OSError("gone")
        self.all.append(emitted)
        if self._run is not None and isinstance(emitted.event, MessageEvent):
            self._run.emit(WarningEvent(text=f"about {emitted.event.text}"))

    def close(self) -> None:
        self.closed += 1

    @property
    def texts(self) -> list[str]:
        return [one.event.text for one in self.all if isinstance(one.event, MessageEvent | WarningEvent)]


def step_of(step: int) -> StepEvent:
    return StepEvent(
        step=step, loss=2.5, count=64.0, gradient_norm=1.0, learning_rate=1e-3, skipped=False, num_skipped=0,
        loss_scale=1.0, memory_bytes=1 << 20,
    )  # fmt: skip


def rate_of(step: int, num_steps: int = 1) -> RateEvent:
    return RateEvent(
        step=step, num_steps=num_steps, samples_per_second=8.0, tokens_per_second=80.0, flops_per_second=None,
        peak_share=None, remaining_seconds=3.0,
    )  # fmt: skip


def test_all_sinks_hear_all_events_in_one_order_from_many_threads() -> None:
    first, run = Heard(), Run(3)
    run.attach(first)
    run.attach(Heard(run))  # speaks in between
    last = Heard()
    run.attach(last)

    def speak(number: int) -> None:
        for i in range(50):
            run.emit(MessageEvent(text=f"{number}.{i}"))

    threads = [threading.Thread(target=speak, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.all == last.all
    assert [one.number for one in first.all] == list(range(400))
    assert {one.rank for one in first.all} == {3}
    for number in range(4):  # of one thread in its own order
        mine = [text for text in first.texts if text.startswith(f"{number}.")]
        assert mine == [f"{number}.{i}" for i in range(50)]


@pytest.mark.parametrize("seed", range(6))
def test_a_sink_that_raises_is_left_out_and_the_others_hear_of_it_once(seed: int) -> None:
    draw = random.Random(seed)
    count, at = draw.randint(1, 8), draw.randint(0, 7)
    sinks = [Heard() for _ in range(count)]
    broken = Heard(breaks_at=at)
    where = draw.randint(0, count)
    run = Run(0, [*sinks[:where], broken, *sinks[where:]])
    for number in range(8):
        run.emit(MessageEvent(text=str(number)))
    assert broken.texts == [str(number) for number in range(at)]
    assert broken.closed == 1
    for sink in sinks:
        said = [text for text in sink.texts if "hears no more" in text]
        assert said == ["Heard hears no more of this run: it raised OSError: gone"]
        assert [text for text in sink.texts if text not in said] == [str(number) for number in range(8)]
    run.close()
    assert [sink.closed for sink in sinks] == [1] * count
    run.emit(MessageEvent(text="late"))
    assert all("late" not in sink.texts for sink in sinks)


def test_a_report_is_one_line_of_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Run(0, [MetricsSink(path)]) as run:
        run.emit(step_of(1))
        run.emit(step_of(2))
        run.emit(PhaseEvent(step=2, num_steps=2, seconds={"step_seconds": 1.0, "optimizer_seconds": 0.25}))
        for axis in ("data", "tensor"):
            run.emit(
                CollectiveEvent(
                    step=2, num_steps=2, axis=axis, count=3, num_bytes=96, total_seconds=0.2, exposed_seconds=0.1
                )
            )
        run.emit(MemoryEvent(step=2, peak_bytes=5))
        run.emit(rate_of(2, num_steps=2))
        run.emit(step_of(3))
        run.emit(rate_of(3))
        run.emit(FailureEvent(error="ValueError", text="bad", rank=0, host="here"))
    second, third, failure = map(json.loads, path.read_text().splitlines())
    sums = {"count": 3, "bytes": 96, "total_seconds": 0.2, "exposed_seconds": 0.1}
    assert second.pop("unix_time_seconds") == pytest.approx(time.time(), abs=60)
    assert second == {
        "kind": "step", "step": 2, "loss": 2.5, "count": 64.0, "gradient_norm": 1.0, "learning_rate": 1e-3,
        "skipped": False, "loss_scale": 1.0, "samples_per_second": 8.0, "tokens_per_second": 80.0,
        "flops_per_second": None, "peak_share": None, "memory_bytes": 1 << 20, "step_seconds": 1.0,
        "optimizer_seconds": 0.25, "communication": {"data": sums, "tensor": sums},
    }  # fmt: skip
    assert (third["step"], third["communication"]) == (3, {})
    assert (failure["kind"], failure["error"], failure["rank"]) == ("failure", "ValueError", 0)


def test_a_users_loggers_are_left_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("weft")
    before = (logger.level, logger.propagate)
    with Run(1, [LogSink(tmp_path / "rank-1.log")]) as run, loggers_to(run, all_of_process=False):
        assert (logger.level, logger.propagate) == before
        logging.getLogger("weft.techniques.core").warning("something is slow")
        logging.getLogger("weft.techniques.core").info("a detail")
    assert "something is slow" in caplog.text
    log = (tmp_path / "rank-1.log").read_text()
    assert log.endswith("rank 1 WARNING weft.techniques.core: something is slow\n")
    assert not logger.handlers


def test_warnings_of_a_session_reach_the_user_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script that has not configured logging
    shown = warnings.showwarning
    run = Run(1, [LogSink(tmp_path / "rank-1.log")])

    def speak() -> None:
        with run, loggers_to(run, all_of_process=False):
            logging.getLogger("weft.techniques.core").warning("something is slow")
            warnings.warn("a number", stacklevel=1)

    with pytest.warns(UserWarning, match="a number") as caught:
        speak()
    assert warnings.showwarning is shown
    assert len(caught) == 1
    assert "something is slow" in capsys.readouterr().err
    log = (tmp_path / "rank-1.log").read_text()
    assert "WARNING weft.techniques.core: something is slow" in log
    assert "WARNING py.warnings: UserWarning: a number" in log
    assert not logging.getLogger("weft").handlers


def test_a_forked_child_speaks_in_the_log_and_leaves_the_metrics_alone(tmp_path: Path) -> None:
    """A data worker may warn; it knows where the parent's file ended when it was forked, and not where it ends."""
    path = tmp_path / "metrics.jsonl"
    with Run(0, [LogSink(tmp_path / "log"), MetricsSink(path)]) as run:
        run.emit(WarningEvent(text="before"))
        with run._lock:  # pyright: ignore[reportPrivateUsage]  # of another thread, at the moment of the fork
            child = os.fork()
            if child == 0:
                speaker = threading.Thread(target=lambda: run.emit(WarningEvent(text="of the child")))
                speaker.start()
                speaker.join(5)
                os._exit(speaker.is_alive())
        run.emit(WarningEvent(text="of the parent, which is longer"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [
        "before",
        "of the parent, which is longer",
    ]
    assert "of the child" in (tmp_path / "log").read_text()


def test_a_step_costs_microseconds(tmp_path: Path) -> None:
    """A step with its report on a rank with metrics and log; 0.1 ms was measured on a free core, 6 µs without sinks."""
    with Run(0, [MetricsSink(tmp_path / "metrics.jsonl"), LogSink(tmp_path / "rank-0.log")]) as run:
        phases: dict[str, Any] = {f"{name}_seconds": 0.1 for name in "abcdefgh"}

        def once() -> None:
            run.emit(step_of(1))
            run.emit(PhaseEvent(step=1, num_steps=1, seconds=phases))
            run.emit(MemoryEvent(step=1, peak_bytes=5))
            run.emit(rate_of(1))

        cost = min(timeit.repeat(once, number=200, repeat=5)) / 200
    assert cost < 1e-3, f"{cost * 1e6:.0f} µs per report"
