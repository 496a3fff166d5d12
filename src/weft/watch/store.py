"""What the ranks of a run did, in an SQLite file of its folder (`telemetry.sqlite`).

One process writes it (`weft.watch.store_writer`), the run's collector, and any number of processes read it meanwhile.
Of a run on several hosts each host that comes to lead begins a further file (`telemetry-2.sqlite`): no file has two
hosts that write, whatever the network's file system makes of locks.  Readers join the files.  What is large is kept as
arrays: per step one float32 matrix, ranks × columns.  Losing a file, or a part of it, costs pictures and never the run:
everything else about a run is in `metrics.jsonl`.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray

from weft.errors import LaunchError

FILE_NAME = "telemetry.sqlite"
VERSION = 1
"""Version of the tables.  A reader refuses a newer one; columns may be added to a version."""
_TABLES = ("generation", "names", "step", "part", "traffic", "detail", "live", "gap", "verdict")
_MOST_FILES = 10
"""Newest files of a run that are read; SQLite joins no more."""

Matrix = NDArray[np.float32]

SPAN = np.dtype(
    [
        ("name", "<i4"),
        ("stage", "<i2"),
        ("microbatch", "<i2"),
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("cpu_ns", "<i8"),
    ]  # fmt: skip
)
"""One span of a rank: index into its names, pipeline stage and microbatch (−1: none), start on the host's monotonic
clock, duration, and the time that its thread ran on a processor (−1: not asked)."""
COLLECTIVE = np.dtype(
    [
        ("axis", "<i4"),
        ("operation", "<i4"),
        ("num_bytes", "<i8"),
        ("launched_ns", "<i8"),
        ("done_ns", "<i8"),
        ("waited_ns", "<i8"),
        ("exposed_ns", "<i8"),
    ]  # fmt: skip
)
"""One collective of a rank: indexes of its axis and operation, bytes of the whole tensor, launch, end (0: not seen),
begin of the first wait (0: none), and the time inside waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step as all ranks agreed on it."""

    generation: int
    step: int
    """Finished steps, this one included."""
    num_steps: int = 1
    """Steps that the row stands for, `step` being the last of them."""
    unix_time: float
    """Seconds since 1970 at the begin of the step on the rank that began first."""
    seconds: float
    """Wall time of the step on the rank that took longest; the mean of `num_steps`."""
    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    count: float | None = None
    """Tokens with a label, or samples, of the global batch."""
    skipped: int = 0
    """Steps of these whose update was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFacts:
    """What is known of one generation of the job when it begins."""

    number: int
    unix_time: float
    world_size: int
    plan: str = ""
    """The plan as TOML."""
    plan_digest: str = ""
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of the mesh axes above 1, outermost first."""
    ranks: Sequence[Mapping[str, Any]] = ()
    """Facts of each rank: `host`, `pid`, `device`, `coordinates` (axis → index), `memory` (bytes by kind), and of
    other hosts `clock`: the `offset_seconds` of their clock, and its `error_seconds`."""
    predicted: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Prediction of the planner: `seconds` by term, `memory` (by stage, bytes by kind), `traffic` (axis → operation →
    [count, bytes] of one rank and step), `spans` (rank on the pipeline axis, kind, chunk, microbatch, start, stop),
    `learned` (a sentence on the runs that have corrected it, or nothing)."""
    model_flops: float = 0.0
    """FLOPs of one step of all ranks; 0 where unknown."""
    peak_flops: float = 0.0
    """Measured FLOP/s of matrix products of all ranks together; 0 where unknown."""
    alone_flops: float = 0.0
    """The same, had every rank had its processors for itself while it was measured; 0 where unknown."""
    samples_per_step: int = 0
    tokens_per_sample: int = 0
    """0 for samples that have no tokens."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def clock_error_seconds(self) -> float | None:
        """How far times of other hosts may be off beside those of the collector's; None where there are none, or their
        clocks were not compared."""
        errors = [float(about["clock"]["error_seconds"]) for about in self.ranks if "clock" in about]
        return max(errors, default=None)


class StepWindow(NamedTuple):
    """Consecutive recorded steps of one generation."""

    generation: int
    steps: NDArray[np.int64]
    """Shape (steps,): finished steps."""
    num_steps: NDArray[np.int64]
    """Shape (steps,): steps that each row stands for."""
    unix_times: NDArray[np.float64]
    """Shape (steps,): begin of each."""
    columns: tuple[str, ...]
    values: Matrix
    """Shape (steps, ranks, columns); nan where a rank's part is missing."""

    def column(self, name: str) -> Matrix:
        """Return one column, shape (steps, ranks); zeros where nothing of that name was recorded."""
        if name not in self.columns:
            return np.zeros(self.values.shape[:2], dtype=np.float32)
        return self.values[:, :, self.columns.index(name)]


class Gap(NamedTuple):
    """Something that was not recorded."""

    generation: int
    rank: int
    """−1: all."""
    step: int
    """Newest step before it."""
    unix_time: float
    spans: int
    collectives: int
    steps: int
    reason: str


class StepDetail(NamedTuple):
    """Spans and collectives of one rank in one step."""

    rank: int
    names: tuple[str, ...]
    """Names that the records' indexes point into: of spans, axes and operations alike."""
    spans: NDArray[Any]
    """Records of `SPAN`."""
    collectives: NDArray[Any]
    """Records of `COLLECTIVE`."""


@final
class TelemetryReader:
    """Reads a run's telemetry, while it is written or afterwards.  One thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the files of a run's folder.  Of several, one that cannot be read is left out.

        Raises:
            LaunchError: there is none, it is none of Weft's, or a newer Weft wrote it.
        """
        paths = telemetry_files(folder)[-_MOST_FILES:]
        if not paths:
            raise LaunchError(
                f"{folder} has no {FILE_NAME}: the run was not recorded, or has not begun."
                " Runs are recorded unless run.telemetry = false, and sessions unless record=False."
            )
        self._database = sqlite3.connect(":memory:", uri=True, timeout=1.0, isolation_level=None,
                                         check_same_thread=False)  # fmt: skip
        self.paths: list[Path] = []
        """The files that are read, the oldest in front."""
        for path in paths:
            try:
                self._attach(path)
            except LaunchError:
                if len(paths) == 1:
                    raise
        if not self.paths:
            raise _not_of_weft(paths[-1])
        for table in _TABLES:
            # Where ranks are now only the newest file says: whoever wrote the others may have been killed.
            numbers = range(len(self.paths))[-1:] if table == "live" else range(len(self.paths))
            parts = " UNION ALL ".join(f"SELECT * FROM part{number}.{table}" for number in numbers)
            self._database.execute(f"CREATE TEMP VIEW {table} AS {parts}")
        self._names: dict[int, tuple[str, ...]] = {}

    def _attach(self, path: Path) -> None:
        name, journal = f"part{len(self.paths)}", path.with_name(f"{path.name}-journal")
        if journal.is_file() and journal.stat().st_size:
            # Its writer may have been killed while it wrote: only who may write can take that back.
            with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=1.0)) as database:
                database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        try:
            self._database.execute(f"ATTACH ? AS {name}", (f"{path.absolute().as_uri()}?mode=ro",))
        except sqlite3.Error:
            raise _not_of_weft(path) from None
        try:
            (version,) = self._database.execute(f"SELECT value FROM {name}.run WHERE key = 'version'").fetchone()
        except (sqlite3.Error, TypeError):
            self._database.execute(f"DETACH {name}")
            raise _not_of_weft(path) from None
        if int(version) > VERSION:
            self._database.execute(f"DETACH {name}")
            raise LaunchError(
                f"{path} has version {version} of its tables, and this Weft reads up to {VERSION}. Install the Weft"
                " that wrote it."
            )
        self.paths.append(path)

    def close(self) -> None:
        self._database.close()

    def generations(self) -> list[GenerationFacts]:
        """Return all generations, in order."""
        rows = self._database.execute("SELECT facts FROM generation ORDER BY number").fetchall()
        return [GenerationFacts(**json.loads(text)) for (text,) in rows]

    def newest_generation(self) -> int:
        """Return the number of the newest generation that has steps or facts; 0: there is none."""
        (number,) = self._database.execute(
            "SELECT max(coalesce((SELECT max(number) FROM generation), 0), coalesce(max(generation), 0)) FROM step"
        ).fetchone()
        return int(number or 0)

    def seen_at(self) -> float:
        """Return when the ranks were seen last, in seconds since 1970; 0: never."""
        (when,) = self._database.execute(
            "SELECT max(coalesce((SELECT max(unix_time) FROM live), 0), coalesce(max(unix_time), 0)) FROM step"
        ).fetchone()
        return float(when or 0.0)

    def newest_step(self) -> tuple[int, int]:
        """Return the newest (generation, step); (0, 0) before the first."""
        found = self._database.execute(
            "SELECT generation, step FROM step ORDER BY generation DESC, step DESC LIMIT 1"
        ).fetchone()
        return (0, 0) if found is None else cast("tuple[int, int]", found)

    def step_rows(self, *, after: tuple[int, int] = (0, 0), most: int = 2_000) -> list[StepRow]:
        """Return the steps after (generation, step), oldest first, thinned out to about `most` rows.

        Steps that a later generation repeated are still there: the later generation counts.
        """
        where = "(generation, step) > (?, ?)"
        (number,) = self._database.execute(f"SELECT count(*) FROM step WHERE {where}", after).fetchone()
        stride = max(1, -(-number // most))
        rows = self._database.execute(
            f"SELECT * FROM (SELECT *, row_number() OVER (ORDER BY generation DESC, step DESC) AS place FROM step"
            f" WHERE {where}) WHERE (place - 1) % ? = 0 ORDER BY generation, step",
            (*after, stride),
        ).fetchall()
        names = StepRow.__dataclass_fields__
        return [StepRow(**dict(zip(names, row[:-1], strict=True))) for row in rows]

    def recorded_steps(self) -> dict[int, list[int]]:
        """Return the steps that have a row, in rising order, by generation; those that a later one repeated, too."""
        found: dict[int, list[int]] = {}
        for generation, step in self._database.execute("SELECT generation, step FROM step ORDER BY generation, step"):
            found.setdefault(generation, []).append(step)
        return found

    def columns(self) -> tuple[str, ...]:
        """Return the columns that any step of the run has, in the order in which they came."""
        rows = self._database.execute("SELECT columns FROM names ORDER BY id").fetchall()
        return tuple(dict.fromkeys(name for (text,) in rows for name in json.loads(text)))

    def window(self, generation: int, first: int = 0, last: int | None = None, *, most: int = 512) -> StepWindow:
        """Return the newest `most` recorded steps between two of a generation, both included."""
        bounds = (generation, first, (1 << 62) if last is None else last)
        inside = "generation = ? AND step BETWEEN ? AND ?"
        heads = self._database.execute(
            f"SELECT step, num_steps, unix_time FROM step WHERE {inside} ORDER BY step DESC LIMIT ?", (*bounds, most)
        ).fetchall()[::-1]
        steps = np.array([head[0] for head in heads], dtype=np.int64)
        oldest = int(steps[0]) if len(steps) else 0
        parts = self._database.execute(
            f"SELECT step, first_rank, names, matrix FROM part WHERE {inside} AND step >= ? ORDER BY step",
            (*bounds, oldest),
        ).fetchall()
        columns = tuple(dict.fromkeys(name for part in parts for name in self._columns(part[2])))
        sizes = [part[1] + len(part[3]) // (4 * len(self._columns(part[2]))) for part in parts]
        values = np.full((len(steps), max(sizes, default=0), len(columns)), np.nan, dtype=np.float32)
        place = {int(step): index for index, step in enumerate(steps)}
        for step, first_rank, names, content in parts:
            if step not in place:
                continue  # written between the two queries
            own = self._columns(names)
            matrix = np.frombuffer(content, dtype="<f4").reshape(-1, len(own))
            at = [columns.index(name) for name in own] if own != columns else slice(None)
            values[place[step], first_rank : first_rank + len(matrix), at] = matrix
        return StepWindow(
            generation=generation,
            steps=steps,
            num_steps=np.array([head[1] for head in heads], dtype=np.int64),
            unix_times=np.array([head[2] for head in heads], dtype=np.float64),
            columns=columns,
            values=values,
        )

    def traffic(self, generation: int, step: int) -> dict[int, dict[str, dict[str, tuple[int, int]]]]:
        """Return what every rank sent in a step: rank → axis → operation → (count, bytes)."""
        rows = self._database.execute(
            "SELECT rank, sums, max(step) FROM traffic WHERE generation = ? AND step <= ? GROUP BY rank",
            (generation, step),
        ).fetchall()
        return {
            rank: {
                axis: {operation: tuple(sums) for operation, sums in kinds.items()}
                for axis, kinds in json.loads(text).items()
            }
            for rank, text, _ in rows
        }

    def detailed_steps(self, generation: int) -> list[int]:
        """Return the steps whose spans are kept, in rising order."""
        rows = self._database.execute(
            "SELECT DISTINCT step FROM detail WHERE generation = ? ORDER BY step", (generation,)
        ).fetchall()
        return [step for (step,) in rows]

    def details(self, generation: int, step: int) -> list[StepDetail]:
        """Return the spans and collectives of a step, by rank."""
        rows = self._database.execute(
            "SELECT rank, names, spans, collectives FROM detail WHERE generation = ? AND step = ? ORDER BY rank",
            (generation, step),
        ).fetchall()
        return [
            StepDetail(
                rank, tuple(json.loads(names)), np.frombuffer(spans, SPAN), np.frombuffer(collectives, COLLECTIVE)
            )
            for rank, names, spans, collectives in rows
        ]

    def live(self) -> dict[int, dict[str, Any]]:
        """Return where every rank is, with `generation` and `unix_time` of when it was seen; empty after the end."""
        rows = self._database.execute("SELECT rank, generation, unix_time, state FROM live ORDER BY rank").fetchall()
        return {
            rank: {**json.loads(state), "generation": generation, "unix_time": when}
            for rank, generation, when, state in rows
        }

    def gaps(self) -> list[Gap]:
        """Return what was not recorded, in order."""
        rows = self._database.execute(
            "SELECT generation, rank, step, unix_time, spans, collectives, steps, reason FROM gap ORDER BY id"
        ).fetchall()
        return [Gap(*row) for row in rows]

    def verdicts(self, *, after: int = 0) -> list[dict[str, Any]]:
        """Return the verdicts with a larger `id`, in order, with `id`, `generation`, `step` and `unix_time`."""
        rows = self._database.execute(
            "SELECT id, generation, step, unix_time, facts FROM verdict WHERE id > ? ORDER BY id", (after,)
        ).fetchall()
        return [
            {**json.loads(facts), "id": number, "generation": generation, "step": step, "unix_time": when}
            for number, generation, step, when, facts in rows
        ]

    def _columns(self, names: int) -> tuple[str, ...]:
        if names not in self._names:
            (text,) = self._database.execute("SELECT columns FROM names WHERE id = ?", (names,)).fetchone()
            self._names[names] = tuple(json.loads(text))
        return self._names[names]


def has_telemetry(folder: Path) -> bool:
    """Return whether a run's folder has telemetry."""
    return bool(telemetry_files(folder))


def telemetry_files(folder: Path) -> list[Path]:
    """Return the files of a run's telemetry, the oldest in front."""
    return [folder / file_name(number) for number in _numbers(folder)]


def remove_logs(folder: Path) -> None:
    """Remove the write-ahead logs that readers leave beside the files of a run that has ended: SQLite does so where the
    last one that closes may write.  Raises `sqlite3.Error`."""
    for path in telemetry_files(folder):
        with closing(sqlite3.connect(path, timeout=1.0)) as database:
            database.execute("SELECT value FROM run LIMIT 1").fetchone()


def newest_file(folder: Path) -> int:
    """Return the number of the newest file of a run's telemetry; 0: there is none."""
    return max(_numbers(folder), default=0)


def file_name(number: int) -> str:
    """Return the name of the file of this number, from 1."""
    return FILE_NAME if number == 1 else f"telemetry-{number}.sqlite"


def _numbers(folder: Path) -> list[int]:
    names = [path.name for path in folder.glob("telemetry*.sqlite") if path.is_file()]
    found = [re.fullmatch(r"telemetry(?:-([1-9]\d{0,5}))?\.sqlite", name) for name in names]
    return sorted(int(match[1] or 1) for match in found if match is not None)


def _not_of_weft(path: Path) -> LaunchError:
    return LaunchError(f"{path} is no telemetry of Weft's. Remove it; the run needs it for nothing.")
