"""The sink of `metrics.jsonl`.  A full disk costs lines, never the run; the lines lost are counted and told."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from weft.events._events import (
    CheckpointEvent,
    CollectiveEvent,
    EvaluationEvent,
    FailureEvent,
    GenerationEvent,
    PhaseEvent,
    RateEvent,
    StepEvent,
    WarningEvent,
    fields_of_event,
)
from weft.events._run import Emitted
from weft.events._sinks import Listening

logger = logging.getLogger(__name__)

Metric = None | bool | int | float | str | list["Metric"] | dict[str, "Metric"]


class MetricsWriter:
    """Appends one object per line to `metrics.jsonl`; each line reaches the operating system before `write` returns.

    Units are in the names (`_seconds`, `_bytes`, `_per_second`).  NaN and infinity, which JSON has not, become null.
    A resumed run appends to the same file; of two lines of one step the later counts.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending, and end a line that a killed run left unfinished.  Never raises `OSError`."""
        self.path = path
        self.dropped = 0
        """Lines that could not be written."""
        self._untold = 0
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._end = _end_of_last_line(self._descriptor)
        except OSError as error:
            self._end = 0
            self._warn(error)

    def write(self, values: Mapping[str, Metric]) -> None:
        """Append one line.  After lines were lost the next one says how many, as `dropped_lines`."""
        line = {**values, "dropped_lines": self._untold} if self._untold else values
        content = (json.dumps(_sound(line), allow_nan=False) + "\n").encode()
        try:
            if self._descriptor is None:
                raise OSError("the file is not open")
            # At a known end and not by appending: a line that the disk took only in part is overwritten by the next
            # one.
            if os.pwrite(self._descriptor, content, self._end) != len(content):  # the disk took a part: not a line
                os.ftruncate(self._descriptor, self._end)
                raise OSError("the disk took only a part of the line")
        except OSError as error:
            self.dropped += 1
            self._untold += 1
            if self._untold == 1:
                self._warn(error)
            return
        self._end += len(content)
        self._untold = 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self, error: OSError) -> None:
        logger.warning("%s is not written (%s); training goes on and lost lines are counted", self.path, error)


class MetricsSink:
    """One line of `metrics.jsonl` for every report of steps, evaluation, checkpoint, warning and failure.

    A report's events become one line: the step's values, rates, seconds by phase, and `communication` by axis.
    """

    def __init__(self, path: Path) -> None:
        self.writer = MetricsWriter(path)
        self._process = os.getpid()
        self._step: dict[str, Metric] = {}
        self._seconds: dict[str, Metric] = {}
        self._communication: dict[str, Metric] = {}

    def take(self, emitted: Emitted) -> None:
        if os.getpid() != self._process:
            return  # a forked child knows no more where the file ends
        match emitted.event:
            case StepEvent() as event:
                self._step = {**fields_of_event(event), "kind": event.kind}
                empty = (name for name in ("auxiliary", "load", "router_entropy") if not getattr(event, name))
                for name in ("num_skipped", "some_unused", "stop", *empty):
                    del self._step[name]
            case PhaseEvent() as event:
                self._seconds = dict(event.seconds)
            case CollectiveEvent() as event:
                self._communication[event.axis] = {
                    "count": event.count,
                    "bytes": event.num_bytes,
                    "total_seconds": event.total_seconds,
                    "exposed_seconds": event.exposed_seconds,
                }
            # The last event of a report: what the others have brought becomes one line.
            case RateEvent() as event:
                self._report(event, emitted.unix_time_seconds)
            case EvaluationEvent() | CheckpointEvent() | WarningEvent() | FailureEvent() | GenerationEvent() as event:
                when = {"unix_time_seconds": emitted.unix_time_seconds}
                self.writer.write({"kind": event.kind, **fields_of_event(event), **when})
            case _:
                return

    def close(self) -> None:
        self.writer.close()

    def _report(self, event: RateEvent, unix_time_seconds: float) -> None:
        rates = fields_of_event(event)
        del rates["step"], rates["num_steps"], rates["remaining_seconds"]
        self.writer.write(
            {
                **self._step,
                **rates,
                "unix_time_seconds": unix_time_seconds,
                **self._seconds,
                "communication": self._communication,
            }
        )
        self._seconds, self._communication = {}, {}


def create(run: Listening) -> MetricsSink | None:
    """See `weft.events.sinks`."""
    return MetricsSink(run.of_model.metrics) if run.of_model is not None and run.rank == 0 else None


def _sound(value: Metric | Mapping[str, Metric]) -> Metric:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _sound(item) for key, item in value.items()}
    return [_sound(item) for item in value] if isinstance(value, list) else value


def _end_of_last_line(descriptor: int) -> int:
    """Return where the last whole line ends, and cut off what stands behind it."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end != size:
        os.ftruncate(descriptor, end)
    return end
