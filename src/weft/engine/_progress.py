"""What a person sees while training: one line per logged step, and a bar below them on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One logged step.  What is None is unknown or does not matter, and is not shown."""

    step: int
    loss: float
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    """Shown only when there are no tokens."""
    sample_unit: str = "samples"
    """What a sample is called: `images` for images."""
    peak_share: float | None = None
    memory_bytes: int | None = None
    """Of the rank that holds most."""
    remaining_seconds: float | None = None
    learning_rate: float | None = None
    """Given when the schedule changes it."""
    gradient_norm: float | None = None
    """Given when gradients are clipped."""
    skipped_steps: int = 0
    """Non-finite steps since the start."""


class ProgressPrinter:
    """Prints on rank 0.  Columns grow to the widest value seen, so that lines stay under one another.

    On a terminal a bar is shown below the lines and cleared at the end; else there are plain lines only.  A reader that
    goes away (`weft train | head`) ends the printing, never the training.
    """

    def __init__(self, num_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        """Start the display.  `first_step` is the number of steps done before, when a run is resumed."""
        self._stream = stream if stream is not None else sys.stdout
        self._widths: dict[str, int] = {"step": max(4, len(str(num_steps)))}
        self._lost = False
        self._bar: Progress | None = None
        if self._stream.isatty():
            console = Console(file=self._stream, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._bar = bar
            self._task = self._bar.add_task("training", total=num_steps, completed=first_step)
            self._bar.start()

    def report(self, report: StepReport) -> None:
        """Print the line of one step."""
        self.message(format_step(report, self._widths))
        self.advance(report.step)

    def advance(self, step: int) -> None:
        """Move the bar to `step` without a line."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def message(self, text: str) -> None:
        """Print a line among the steps (an evaluation, a checkpoint) without disturbing the bar."""
        if self._lost:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, soft_wrap=True)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream was closed
            self._lost = True

    def close(self) -> None:
        """Clear the bar.  The lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def format_step(report: StepReport, widths: dict[str, int] | None = None) -> str:
    """Return the line of one step.  `widths` holds the widest value of each column so far and is brought up to date."""
    widths = {"step": 4} if widths is None else widths
    cells = list[str]()
    for label, text, unit in _columns(report):
        column = label or unit
        widths[column] = max(widths.get(column, 0), len(text))
        cells.append(" ".join(part for part in (label, text.rjust(widths[column]), unit) if part))
    return "  ".join(cells)


def _columns(report: StepReport) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, unit) of what is known."""
    yield "step", str(report.step), ""
    yield "loss", format_loss(report.loss), ""
    if report.learning_rate is not None:
        yield "lr", f"{report.learning_rate:.2e}", ""
    if report.gradient_norm is not None:
        yield "grad norm", format_loss(report.gradient_norm), ""
    if report.tokens_per_second is not None:
        yield "tok/s", _rate(report.tokens_per_second), ""
    elif report.samples_per_second is not None:
        yield f"{report.sample_unit}/s", _rate(report.samples_per_second), ""
    if report.peak_share is not None:
        yield "", f"{100 * report.peak_share:.0f}", "% of peak"
    if report.memory_bytes is not None:
        yield "", f"{report.memory_bytes / 1e9:.2f}", "GB/rank"
    if report.skipped_steps:
        yield "skipped", str(report.skipped_steps), ""
    if report.remaining_seconds is not None:
        yield "ETA", format_duration(report.remaining_seconds), ""


def format_loss(loss: float) -> str:
    """Three decimals where they say something, else three digits and an exponent; `nan` and `inf` as they are."""
    if loss == 0 or not math.isfinite(loss) or 0.01 <= abs(loss) < 10_000:
        return f"{loss:.3f}"
    return f"{loss:.2e}"


def format_duration(seconds: float) -> str:
    """`42s`, `3m10s`, `5h07m`, `2d03h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(whole / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(whole / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"
