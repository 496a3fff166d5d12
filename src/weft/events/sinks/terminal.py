"""The terminal's view of a training: one line per report, and a progress bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from weft.events._events import EndEvent, FailureEvent, RateEvent, StartEvent, StepEvent, WarningEvent
from weft.events._format import format_duration, format_loss, text_of
from weft.events._run import Emitted
from weft.events._sinks import Listening


class TerminalSink:
    """Prints on rank 0.  Columns grow to the widest value seen, so that lines stay under one another.

    On a terminal a bar is shown below the lines and cleared at the end; else there are plain lines only.  A reader that
    goes away (`weft train | head`) ends the printing, never the training.  Warnings and failures are for stderr.
    """

    def __init__(self, stream: TextIO | None = None, *, shows_learning_rate: bool = False) -> None:
        """Print nothing yet.  With `shows_learning_rate`, which is for schedules that change it, it gets a column."""
        self._stream = stream if stream is not None else sys.stdout
        self._shows_learning_rate = shows_learning_rate
        self._widths: dict[str, int] = {"step": 4}
        self._step: StepEvent | None = None
        self._lost = False
        self._bar: Progress | None = None

    def take(self, emitted: Emitted) -> None:
        match emitted.event:
            case StartEvent() as event:
                self._start(event)
            case EndEvent():
                self.close()
            case StepEvent() as event:
                self._step = event
                self._say(text_of(event))
                self._advance(event.step)
            case RateEvent() as event if self._step is not None:
                self._say(format_step(self._step, event, self._widths, learning_rate=self._shows_learning_rate))
            case WarningEvent() | FailureEvent():
                return
            case event:
                self._say(text_of(event))

    def close(self) -> None:
        """Clear the bar.  The lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self, event: StartEvent) -> None:
        self._widths["step"] = max(4, len(str(event.num_steps or 0)))
        if self._stream.isatty() and event.num_steps is not None:
            console = Console(file=self._stream, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._bar = bar
            self._task = bar.add_task("training", total=event.num_steps, completed=event.step)
            bar.start()

    def _advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def _say(self, text: str | None) -> None:
        if self._lost or text is None:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, soft_wrap=True)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream was closed
            self._lost = True


def format_step(
    step: StepEvent, rate: RateEvent | None, widths: dict[str, int] | None = None, *, learning_rate: bool = False
) -> str:
    """Return the line of one step.  `widths` holds the widest value of each column so far and is brought up to date."""
    widths = {"step": 4} if widths is None else widths
    cells = list[str]()
    for label, text, unit in _columns(step, rate, learning_rate):
        column = label or unit
        widths[column] = max(widths.get(column, 0), len(text))
        cells.append(" ".join(part for part in (label, text.rjust(widths[column]), unit) if part))
    return "  ".join(cells)


def _columns(step: StepEvent, rate: RateEvent | None, learning_rate: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, unit) of what is known."""
    yield "step", str(step.step), ""
    yield "loss", format_loss(step.loss), ""
    if learning_rate:
        yield "lr", f"{step.learning_rate:.2e}", ""
    if rate is not None and rate.tokens_per_second is not None:
        yield "tok/s", _rate(rate.tokens_per_second), ""
    elif rate is not None:
        yield "samples/s", _rate(rate.samples_per_second), ""
    if rate is not None and rate.peak_share is not None:
        yield "", f"{100 * rate.peak_share:.0f}", "% of peak"
    if step.memory_bytes:
        yield "", f"{step.memory_bytes / 2**30:,.2f}", "GiB/rank"
    if step.num_skipped:
        yield "skipped", str(step.num_skipped), ""
    if rate is not None and rate.remaining_seconds is not None:
        yield "ETA", format_duration(rate.remaining_seconds), ""


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def create(run: Listening) -> TerminalSink | None:
    """See `weft.events.sinks`."""
    return TerminalSink(shows_learning_rate=run.prints_learning_rate) if run.prints_steps and run.rank == 0 else None
