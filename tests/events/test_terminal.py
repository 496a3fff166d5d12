"""What the person at the terminal reads."""

from __future__ import annotations

import io
import math
import os
import pty
import threading
from typing import Any, TextIO

import pytest

from weft.events import MessageEvent, RateEvent, Run, StartEvent, StepEvent, format_duration, format_loss
from weft.events.sinks.terminal import TerminalSink, format_step


def step_of(step: int, *, memory_bytes: int = 0, num_skipped: int = 0) -> StepEvent:
    return StepEvent(
        step=step, loss=7.4123, count=1.0, gradient_norm=1.25, learning_rate=3e-4, skipped=False,
        num_skipped=num_skipped, loss_scale=1.0, memory_bytes=memory_bytes,
    )  # fmt: skip


def rate_of(step: int, **known: Any) -> RateEvent:
    unknown = dict.fromkeys(("tokens_per_second", "flops_per_second", "peak_share", "remaining_seconds"))
    values: dict[str, Any] = {"step": step, "num_steps": 1, "samples_per_second": 1.0, **unknown, **known}
    return RateEvent(**values)


def report(run: Run, step: int, **known: Any) -> None:
    run.emit(step_of(step))
    run.emit(rate_of(step, **known))


def started(stream: TextIO, num_steps: int, step: int = 0) -> Run:
    run = Run(0, [TerminalSink(stream)])
    run.emit(StartEvent(step=step, num_steps=num_steps, world_size=1, plan=""))
    return run


def test_a_line_of_tokens() -> None:
    line = format_step(
        step_of(20, memory_bytes=210_000_000),
        rate_of(20, tokens_per_second=1410, peak_share=0.42, remaining_seconds=190),
    )
    assert line == "step   20  loss 7.412  tok/s 1,410  42 % of peak  0.20 GiB/rank  ETA 3m10s"


def test_a_line_of_samples_with_what_matters_only_sometimes() -> None:
    line = format_step(step_of(7, num_skipped=2), rate_of(7, samples_per_second=93.4), learning_rate=True)
    assert line == "step    7  loss 7.412  lr 3.00e-04  samples/s 93  skipped 2"


def test_what_is_unknown_is_not_shown() -> None:
    assert format_step(step_of(1), None) == "step    1  loss 7.412"


def test_columns_stay_under_one_another() -> None:
    stream = io.StringIO()
    run = started(stream, 20_000)
    for step, rate, left in ((1, 990.0, 4000.0), (10, 12_345.0, 3000.0), (20_000, 998.0, 59.0)):
        report(run, step, tokens_per_second=rate, remaining_seconds=left)
    assert stream.getvalue().splitlines() == [
        "step     1  loss 7.412  tok/s 990  ETA 1h07m",
        "step    10  loss 7.412  tok/s 12,345  ETA 50m00s",
        "step 20000  loss 7.412  tok/s    998  ETA    59s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (190, "3m10s"),
        (3599.7, "1h00m"),
        (18_420, "5h07m"),
        (86_395, "1d00h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (9.0109, "9.011"),
        (0.0, "0.000"),
        (0.00042, "4.20e-04"),
        (123_456.0, "1.23e+05"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_losses(loss: float, text: str) -> None:
    assert format_loss(loss) == text


def test_plain_lines_when_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with started(stream, 10) as run:
        report(run, 1)
        run.emit(step_of(2))
        run.emit(MessageEvent(text="saved [step] 2"))
    assert stream.getvalue() == "step    1  loss 7.412  samples/s 1.0\nsaved [step] 2\n"


def test_a_reader_that_goes_away_does_not_stop_training() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: SIM115 - closing it is the point
    run = started(stream, 10)
    report(run, 1)
    report(run, 2)
    with pytest.raises(BrokenPipeError):
        stream.close()  # what the first line left in Python's buffer


def test_a_bar_on_a_terminal_is_cleared_and_the_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                content = os.read(leader, 4096)
            except OSError:  # the other end is closed
                return
            seen.extend(content)

    reader = threading.Thread(target=read)
    reader.start()
    with open(follower, "w") as stream, started(stream, 4, step=1) as run:
        for step in (2, 3, 4):
            report(run, step)
    reader.join(timeout=5)
    os.close(leader)
    text = seen.decode()
    assert "training" in text
    assert "100%" in text
    assert [line for line in ("step    2", "step    3", "step    4") if line not in text] == []
    assert text.rstrip().endswith("\x1b[2K"), "the bar's line is erased at the end"
