"""Everything that is known of a run, behind one object: what the dashboard, the terminal view and the report read.

A run's folder holds its telemetry (`weft.watch.store`), rank 0's reports (`metrics.jsonl`), its recipe and its plan.
Any of them may be missing, and each may still grow: `refresh` takes in what has come since.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, final

import numpy as np

from weft.errors import LaunchError
from weft.events import FolderOwner, RunFolder
from weft.events.profile_request import ProfileRequest, facts_path, window_folder
from weft.watch.profiles import RankProfile, read_window
from weft.watch.store import (
    FILE_NAME,
    Gap,
    GenerationFacts,
    StepDetail,
    StepRow,
    StepWindow,
    TelemetryReader,
    telemetry_files,
)
from weft.watch.verdicts import MOST_STEPS, RunVerdict, judge, judge_stall, newest_steps

RunState = Literal["running", "ended", "lost", "unknown"]
"""`lost`: its process ended without saying so; `unknown`: the folder names no process."""

_WINDOW_VALUES = 12_000_000
"""Values of the newest steps that are held: 48 MB."""
_WINDOW_STEPS = 512
_LATE_STEPS = 8
"""Newest steps that are read again, for the parts of other hosts may have come later."""
_MOST_ROWS = 4_000
"""Steps, reports and events that are held each; of more the older ones are thinned out."""
_MOST_PROFILES = 4
_LIVE_SECONDS = 30.0
"""Age of a rank's sign of life above which it says nothing of whether the run goes on."""


@final
class RunRecord:
    """A run as its folder shows it.  `refresh` it from one thread at a time; everything else only reads."""

    def __init__(self, folder: Path) -> None:
        """Open the folder of a run and read what there is.

        Raises:
            LaunchError: there is no such folder, or nothing of a run is in it.
        """
        self.folder = RunFolder.open(folder)
        self.name = self.folder.path.absolute().name
        known = (self.folder.recipe, self.folder.plan, self.folder.metrics, folder / FILE_NAME)
        if not any(path.is_file() for path in known):
            raise LaunchError(
                f"{folder} is no folder of a run: it has no {', '.join(path.name for path in known[:3])} and no"
                f" {FILE_NAME}. Runs are folders below runs/, unless --run-folder gave another."
            )
        self.revision = 0
        """Grows by one with every refresh that brought something."""
        self.problem = ""
        """Why telemetry cannot be read; empty where it can, or where there is none."""
        self.recipe = self.plan = ""
        """Both as TOML; empty where there is none."""
        self.generations: Sequence[GenerationFacts] = ()
        self.steps: list[StepRow] = []
        """Steps in order, thinned out; of repeated ones those of the newest generation."""
        self.window = _no_window()
        """Newest steps of the newest generation, rank by rank."""
        self.reports: list[dict[str, Any]] = []
        """Rank 0's reports of steps: lines of `metrics.jsonl`."""
        self.events: list[dict[str, Any]] = []
        """Other lines of `metrics.jsonl`, in order."""
        self.live: Mapping[int, Mapping[str, Any]] = {}
        self.gaps: Sequence[Gap] = ()
        self.owner: FolderOwner | None = None
        self._stored: list[dict[str, Any]] = []
        self._offset = 0
        self._reader: TelemetryReader | None = None
        self._judged: tuple[int, int, list[RunVerdict]] | None = None
        self._generations_read = (0, 0)
        self._samples_bytes = 0
        self._profiled: tuple[object, list[RankProfile]] | None = None
        """Files of the newest profile, and what they hold."""
        self.refresh()

    @property
    def facts(self) -> GenerationFacts:
        """The newest generation; an empty one where nothing is recorded."""
        if self.generations:
            return self.generations[-1]
        return GenerationFacts(number=0, unix_time=self._first_time(), world_size=0, plan=self.plan)

    @property
    def num_ranks(self) -> int:
        """Ranks of the newest generation; 0 where unknown."""
        return self.facts.world_size or int(self.window.values.shape[1])

    @property
    def state(self) -> RunState:
        """Whether the run goes on."""
        if self.owner is not None:
            if self.owner.ended:
                return "ended"
            if self.owner.is_gone:
                return "lost"
            if self.owner.is_here or self.silent_seconds < self.owner.silent_seconds:
                return "running"
            return "lost"
        return "running" if time.time() - self.seen_at < _LIVE_SECONDS else "unknown"

    @property
    def seen_at(self) -> float:
        """Time (seconds since 1970) at which the recorder last looked at the ranks; 0: it never did, or has ended."""
        return max((float(state["unix_time"]) for state in self.live.values()), default=0.0)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the end of the newest step; 0 before the first."""
        if not self.steps:
            return 0.0
        newest = self.steps[-1]
        return max(time.time() - newest.unix_time - newest.seconds * newest.num_steps, 0.0)

    @property
    def usual_seconds(self) -> float:
        """Median of the newest steps' wall times; 0 before the first."""
        return statistics.median(row.seconds for row in self.steps[-50:]) if self.steps else 0.0

    @property
    def stall(self) -> RunVerdict | None:
        """What is said of a living run that makes no step, and of the rank that others wait for; None if it goes on."""
        if self.state != "running" or not self.live or not self.steps:
            return None
        newest = self.steps[-1]
        # Judged as of when ranks were last looked at: a recorder that lags behind is no run that stands still.
        stalled = self.seen_at - newest.unix_time - newest.seconds * newest.num_steps
        if min(int(state["step"]) for state in self.live.values()) > newest.step:
            return None
        seconds = [row.seconds for row in self.steps[-MOST_STEPS:]]
        return judge_stall(self.live, self.facts, stalled_seconds=stalled, step_seconds=seconds)

    @property
    def is_recorded(self) -> bool:
        """Whether ranks recorded their time; else only rank 0's reports are known."""
        return bool(len(self.window.steps))

    @property
    def verdicts(self) -> list[RunVerdict]:
        """What holds the newest steps back, the costliest first."""
        key = (self.window.generation, int(self.window.steps[-1]) if len(self.window.steps) else 0)
        if self._judged is None or self._judged[:2] != key:
            self._judged = (*key, judge(newest_steps(self.window), self.facts))
        return self._judged[2]

    @property
    def stored_verdicts(self) -> list[dict[str, Any]]:
        """What was found while the run went on, in order, hangs among them."""
        return self._stored

    def traffic(self) -> dict[int, dict[str, dict[str, tuple[int, int]]]]:
        """Return what every rank sent in the newest step: rank → axis → operation → (count, bytes)."""
        if self._reader is None or not len(self.window.steps):
            return {}
        return self._reader.traffic(self.window.generation, int(self.window.steps[-1]))

    @property
    def profiles(self) -> list[RankProfile]:
        """What the first ranks have written in the newest window of a profile (`weft profile`), at most four of them:
        a trace has some megabytes."""
        asked = ProfileRequest.newest(self.folder)
        if asked is None:
            return []
        window = window_folder(self.folder, asked.number)
        there = tuple(rank for rank in asked.ranks[:_MOST_PROFILES] if os.path.exists(facts_path(window, rank)))
        if self._profiled is None or self._profiled[0] != (window, there):
            self._profiled = (window, there), read_window(window, there)
        return self._profiled[1]

    def detailed_steps(self) -> list[int]:
        """Return the steps of the newest generation whose spans are kept."""
        return self._reader.detailed_steps(self.window.generation) if self._reader is not None else []

    def details(self, step: int) -> list[StepDetail]:
        """Return spans and collectives of every rank in a step of the newest generation."""
        return self._reader.details(self.window.generation, step) if self._reader is not None else []

    def refresh(self) -> bool:
        """Take in what has come since.  Return whether anything has; nothing is raised for a file that is bad."""
        before = self._mark()
        self.owner = self.folder.owner
        self.recipe = _text(self.folder.recipe)
        self.plan = _text(self.folder.plan)
        self._samples_bytes = _size(self.folder.path / "samples.jsonl")
        self._read_lines()
        try:
            self._read_telemetry()
            self.problem = ""
        except (sqlite3.Error, LaunchError, ValueError, TypeError, KeyError) as error:
            self.problem = str(error) if isinstance(error, LaunchError) else f"{FILE_NAME} cannot be read: {error}"
        if self._reader is None and not self.problem:
            self.steps = _steps_of(self.reports)
        changed = self._mark() != before
        self.revision += changed
        return changed

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _mark(self) -> tuple[object, ...]:
        newest = (self.steps[-1].generation, self.steps[-1].step) if self.steps else None
        return (newest, len(self.steps), self._offset, len(self.gaps), len(self._stored), len(self.generations),
                self.seen_at, self.recipe, self.plan, self.problem, self.state, self._samples_bytes)  # fmt: skip

    def _first_time(self) -> float:
        return float(self.reports[0].get("unix_time_seconds") or 0.0) if self.reports else 0.0

    def _read_lines(self) -> None:
        """Read the whole lines of `metrics.jsonl` behind those that were read before."""
        try:
            with self.folder.metrics.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # another file by now
                    self._offset, self.reports, self.events = 0, [], []
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        for values in objects_of(content[:whole]):
            (self.reports if is_report(values) else self.events).append(values)
        self.reports, self.events = _thinned(self.reports), self.events[-_MOST_ROWS:]

    def _read_telemetry(self) -> None:
        files = telemetry_files(self.folder.path)
        if self._reader is not None and self._reader.paths[-1:] != files[-1:]:
            self.close()  # another host leads by now, and writes a file of its own
        if self._reader is None:
            if not files:
                return
            self._reader = TelemetryReader(self.folder.path)
            self.steps, self._stored = [], []
        reader = self._reader
        self.generations = reader.generations()
        self.live, self.gaps = reader.live(), reader.gaps()
        self._stored += reader.verdicts(after=int(self._stored[-1]["id"]) if self._stored else 0)
        after = (self.steps[-1].generation, self.steps[-1].step) if self.steps else (0, 0)
        rows = reader.step_rows(after=after)
        if rows and self.steps and rows[0].step <= self.steps[-1].step:
            self.steps = [row for row in self.steps if row.step < rows[0].step]
        self.steps = _thinned(without_repeats([*self.steps, *rows]))
        self._read_window(reader)

    def _read_window(self, reader: TelemetryReader) -> None:
        """Read the newest steps, and of those that are held only the last few again."""
        generation, step = reader.newest_step()
        held = self.window
        num_columns = len(held.columns) or 40
        num_ranks = max(self.facts.world_size, 1)
        most = int(np.clip(_WINDOW_VALUES // (num_ranks * num_columns), 20, _WINDOW_STEPS))
        if held.generation != generation or len(held.steps) <= _LATE_STEPS or held.steps[-1] > step:
            self.window = reader.window(generation, most=most) if step else _no_window()
            return
        newer = reader.window(generation, int(held.steps[-_LATE_STEPS]), most=most)
        if newer.columns != held.columns or newer.values.shape[1:] != held.values.shape[1:]:
            self.window = reader.window(generation, most=most)
        elif len(newer.steps):
            keep = held.steps < newer.steps[0]
            keep[: max(0, int(keep.sum()) + len(newer.steps) - most)] = False
            self.window = StepWindow(
                generation,
                np.concatenate([held.steps[keep], newer.steps]),
                np.concatenate([held.num_steps[keep], newer.num_steps]),
                np.concatenate([held.unix_times[keep], newer.unix_times]),
                held.columns,
                np.concatenate([held.values[keep], newer.values]),
            )


def objects_of(lines: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects in whole lines of `metrics.jsonl`; a line that has none is left out."""
    for line in lines.splitlines():
        try:
            values: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield cast("dict[str, Any]", values)


def is_report(values: Mapping[str, Any]) -> bool:
    """Return whether a line of `metrics.jsonl` is the report of a step, and no other event."""
    return values.get("kind", "step") == "step"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _no_window() -> StepWindow:
    none = np.zeros(0, dtype=np.int64)
    return StepWindow(0, none, none, np.zeros(0), (), np.zeros((0, 0, 0), dtype=np.float32))


def _thinned(rows: list[Any]) -> list[Any]:
    """Leave out every second of the older rows where there are too many."""
    while len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:-half:2], *rows[-half:]]
    return rows


def without_repeats(rows: Sequence[StepRow]) -> list[StepRow]:
    """Leave out steps that a later generation repeated."""
    kept: list[StepRow] = []
    least = None
    for row in reversed(rows):
        if least is None or row.step < least:
            kept.append(row)
            least = row.step
    return kept[::-1]


def _steps_of(reports: Sequence[Mapping[str, Any]]) -> list[StepRow]:
    """Return steps as rank 0's reports have them.  Each stands for the steps since the report before."""
    rows: list[StepRow] = []
    for report in reports:
        step = report.get("step")
        if not isinstance(step, int):
            continue
        while rows and rows[-1].step >= step:  # of two lines of one step the later counts
            rows.pop()
        number = max(step - rows[-1].step, 1) if rows else 1
        seconds = float(report.get("step_seconds") or 0.0)
        rows.append(
            StepRow(
                generation=1, step=step, num_steps=number, seconds=seconds / number,
                unix_time=float(report.get("unix_time_seconds") or 0.0) - seconds,
                loss=report.get("loss"), gradient_norm=report.get("gradient_norm"),
                learning_rate=report.get("learning_rate"), loss_scale=report.get("loss_scale"),
                count=report.get("count"), skipped=int(bool(report.get("skipped"))),
            )
        )  # fmt: skip
    return rows
