"""What the person at the terminal reads."""

from __future__ import annotations

import io
import math
import os
import pty
import threading
from typing import Any

import pytest

from weft.engine._progress import ProgressPrinter, StepReport, format_duration, format_loss, format_step


def report(step: int, **known: Any) -> StepReport:
    return StepReport(step=step, loss=7.4123, **known)


def test_a_line_of_tokens() -> None:
    line = format_step(
        report(20, tokens_per_second=1410, peak_share=0.42, memory_bytes=210_000_000, remaining_seconds=190)
    )
    assert line == "step   20  loss 7.412  tok/s 1,410  42 % of peak  0.21 GB/rank  ETA 3m10s"


def test_a_line_of_images_with_what_matters_only_sometimes() -> None:
    line = format_step(
        report(
            7, samples_per_second=93.4, sample_unit="images", learning_rate=3e-4, gradient_norm=1.25, skipped_steps=2
        )
    )
    assert line == "step    7  loss 7.412  lr 3.00e-04  grad norm 1.250  images/s 93  skipped 2"


def test_what_is_unknown_is_not_shown() -> None:
    assert format_step(report(1)) == "step    1  loss 7.412"


def test_columns_stay_under_one_another() -> None:
    stream = io.StringIO()
    printer = ProgressPrinter(20_000, stream=stream)
    for step, rate, left in ((1, 990.0, 4000.0), (10, 12_345.0, 3000.0), (20_000, 998.0, 59.0)):
        printer.report(report(step, tokens_per_second=rate, remaining_seconds=left))
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
    with ProgressPrinter(10, stream=stream) as printer:
        printer.report(report(1))
        printer.advance(2)
        printer.message("saved [step] 2")
    assert stream.getvalue() == "step    1  loss 7.412\nsaved [step] 2\n"


def test_a_reader_that_goes_away_does_not_stop_training() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: SIM115 - closing it is the point
    printer = ProgressPrinter(10, stream=stream)
    printer.report(report(1))
    printer.report(report(2))
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
    with open(follower, "w") as stream, ProgressPrinter(4, first_step=1, stream=stream) as printer:
        for step in (2, 3, 4):
            printer.report(report(step))
    reader.join(timeout=5)
    os.close(leader)
    text = seen.decode()
    assert "training" in text
    assert "100%" in text
    assert [line for line in ("step    2", "step    3", "step    4") if line not in text] == []
    assert text.rstrip().endswith("\x1b[2K"), "the bar's line is erased at the end"
