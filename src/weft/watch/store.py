"""What the ranks of a run did, in one SQLite file of its folder (`telemetry.sqlite`).

One process writes it, the run's collector (`weft.watch.collector`), and any number of processes read it meanwhile
(write-ahead log).  What is large is kept as arrays: per step one float32 matrix, ranks × columns.  Losing the file, or
a part of it, costs pictures and never the run: everything else about a run is in `metrics.jsonl`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, cast, final

import numpy as np
from numpy.typing import NDArray

from weft.errors import LaunchError

FILE_NAME = "telemetry.sqlite"
VERSION = 1
"""Version of the tables.  A reader refuses a newer one; columns may be added to a version."""
ROLL_UP_STEPS = 10
"""Steps that one row stands for once it is old."""
RAW_STEPS = 20_000
"""Newest steps of which every one has a row of its own."""
KEPT_DETAILS = 240
"""Newest steps whose spans are kept, before they are thinned out."""
_THINNED = 16
"""One in so many older steps keeps its spans."""

_TABLES = f"""
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS generation (number INTEGER PRIMARY KEY, unix_time REAL NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, columns TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS step (
    generation INTEGER NOT NULL, step INTEGER NOT NULL, num_steps INTEGER NOT NULL, unix_time REAL NOT NULL,
    seconds REAL NOT NULL, loss REAL, gradient_norm REAL, learning_rate REAL, loss_scale REAL, count REAL,
    skipped INTEGER NOT NULL, PRIMARY KEY (generation, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS part (
    generation INTEGER NOT NULL, step INTEGER NOT NULL, first_rank INTEGER NOT NULL, names INTEGER NOT NULL,
    matrix BLOB NOT NULL, PRIMARY KEY (generation, step, first_rank)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS traffic (
    generation INTEGER NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL, sums TEXT NOT NULL,
    PRIMARY KEY (generation, step, rank)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS detail (
    generation INTEGER NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL, spans BLOB NOT NULL,
    collectives BLOB NOT NULL, names TEXT NOT NULL, PRIMARY KEY (generation, step, rank)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS live (rank INTEGER PRIMARY KEY, generation INTEGER NOT NULL, unix_time REAL NOT NULL,
    state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS gap (
    id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, rank INTEGER NOT NULL, step INTEGER NOT NULL,
    unix_time REAL NOT NULL, spans INTEGER NOT NULL, collectives INTEGER NOT NULL, steps INTEGER NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdict (id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, step INTEGER NOT NULL,
    unix_time REAL NOT NULL, facts TEXT NOT NULL);
INSERT OR IGNORE INTO run VALUES ('version', '{VERSION}');
"""

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
    """Facts of each rank: `host`, `pid`, `device`, `coordinates` (axis → index), `memory` (bytes by kind)."""
    predicted: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Prediction of the planner: `seconds` by term, `memory` (by stage, bytes by kind), `traffic` (axis → operation →
    [count, bytes] of one rank and step), `spans` (rank on the pipeline axis, kind, chunk, microbatch, start, stop)."""
    model_flops: float = 0.0
    """FLOPs of one step of all ranks; 0 where unknown."""
    peak_flops: float = 0.0
    """Measured FLOP/s of matrix products of all ranks together; 0 where unknown."""
    samples_per_step: int = 0
    tokens_per_sample: int = 0
    """0 for samples that have no tokens."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


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
class TelemetryWriter:
    """Writes a run's telemetry.  One per run; any thread of its process, one at a time.

    Raises `sqlite3.Error` where the file cannot be written, such as on a full disk: the caller counts what is lost.
    """

    def __init__(self, folder: Path) -> None:
        """Open or make the file of a run's folder."""
        self.path = folder / FILE_NAME
        self._database = sqlite3.connect(self.path, isolation_level=None, timeout=1.0, check_same_thread=False)
        # A crash of the machine may cost the last seconds of telemetry, and never corrupts what was written before.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "journal_size_limit = 16777216"):
            self._database.execute(f"PRAGMA {pragma}").close()
        self._database.executescript(_TABLES)
        self.path.chmod(0o600)
        self._names: dict[tuple[str, ...], int] = {}
        self._traffic: dict[tuple[int, int], str] = {}
        self._rolled_up = 0

    def __enter__(self) -> Self:
        self._database.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the transaction that `with` began: all of it is written, or nothing."""
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")

    def close(self) -> None:
        """Write the log back into the file, and close it."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        self._database.close()

    def newest_generation(self) -> int:
        """Return the number of the newest generation that has steps or facts; 0: there is none."""
        (number,) = self._database.execute(
            "SELECT max(coalesce((SELECT max(number) FROM generation), 0), coalesce(max(generation), 0)) FROM step"
        ).fetchone()
        return int(number or 0)

    def generation(self, facts: GenerationFacts) -> None:
        """Add, or replace, what is known of a generation."""
        text = json.dumps(_plain(facts), allow_nan=False)
        self._database.execute("REPLACE INTO generation VALUES (?, ?, ?)", (facts.number, facts.unix_time, text))

    def step(self, row: StepRow) -> None:
        """Add a step; one that was repeated after a failure belongs to another generation."""
        values = [getattr(row, name) for name in StepRow.__dataclass_fields__]
        self._database.execute(f"REPLACE INTO step VALUES ({', '.join('?' * len(values))})", values)

    def part(self, generation: int, step: int, first_rank: int, columns: Sequence[str], matrix: Matrix) -> None:
        """Add what the ranks of one host did in a step: shape (ranks, columns)."""
        content = np.ascontiguousarray(matrix, dtype="<f4").tobytes()
        row = (generation, step, first_rank, self._names_id(tuple(columns)), content)
        self._database.execute("REPLACE INTO part VALUES (?, ?, ?, ?, ?)", row)

    def traffic(self, generation: int, step: int, rank: int, sums: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Say what a rank sent from this step on: axis → operation → [count, bytes].  Written where it changed."""
        text = json.dumps(sums, sort_keys=True)
        if self._traffic.get((generation, rank)) != text:
            self._traffic[generation, rank] = text
            self._database.execute("REPLACE INTO traffic VALUES (?, ?, ?, ?)", (generation, step, rank, text))

    def detail(self, generation: int, step: int, detail: StepDetail) -> None:
        """Keep the spans and collectives of a rank in one step."""
        names, spans, collectives = json.dumps(detail.names), detail.spans.tobytes(), detail.collectives.tobytes()
        row = (generation, step, detail.rank, spans, collectives, names)
        self._database.execute("REPLACE INTO detail VALUES (?, ?, ?, ?, ?, ?)", row)

    def live(self, generation: int, rank: int, unix_time: float, state: Mapping[str, Any]) -> None:
        """Say where a rank is now: `step`, `phase`, `pid`, `open` (its collective), `completed` (number by axis)."""
        self._database.execute(
            "REPLACE INTO live VALUES (?, ?, ?, ?)", (rank, generation, unix_time, json.dumps(state))
        )

    def end_live(self) -> None:
        """The ranks have ended."""
        self._database.execute("DELETE FROM live")

    def gap(self, gap: Gap) -> None:
        """Say what was not recorded."""
        self._database.execute("INSERT INTO gap VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", gap)

    def verdict(self, generation: int, step: int, unix_time: float, facts: Mapping[str, Any]) -> None:
        """Add a verdict (`weft.watch.verdicts.RunVerdict`)."""
        row = (generation, step, unix_time, json.dumps(facts))
        self._database.execute("INSERT INTO verdict VALUES (NULL, ?, ?, ?, ?)", row)

    def thin_out(self, generation: int, newest: int) -> None:
        """Keep details of the newest steps and of some older ones, and let one row stand for ten old steps."""
        database = self._database
        (limit,) = database.execute(
            "SELECT min(step) FROM (SELECT DISTINCT step FROM detail WHERE generation = ? ORDER BY step DESC LIMIT ?)",
            (generation, KEPT_DETAILS),
        ).fetchone()
        if limit is not None:
            database.execute(
                "DELETE FROM detail WHERE generation = ? AND step < ? AND step % ? != 0", (generation, limit, _THINNED)
            )
        last = (newest - RAW_STEPS) // ROLL_UP_STEPS * ROLL_UP_STEPS
        for step in range(max(self._rolled_up, last - 100 * ROLL_UP_STEPS), last, ROLL_UP_STEPS):
            self._roll_up(generation, step + ROLL_UP_STEPS)
        self._rolled_up = max(self._rolled_up, last)

    def _roll_up(self, generation: int, last: int) -> None:
        """Let one row stand for the ten steps up to `last`."""
        first, database = last - ROLL_UP_STEPS, self._database
        inside = "generation = ? AND step > ? AND step <= ?"
        # Its loss and rates are those of the last step, its times the mean, and what was skipped the sum.
        database.execute(
            "UPDATE step SET num_steps = s.n, seconds = s.seconds, skipped = s.skipped, unix_time = s.unix_time FROM"
            " (SELECT sum(num_steps) AS n, sum(seconds * num_steps) / sum(num_steps) AS seconds,"
            f" sum(skipped) AS skipped, min(unix_time) AS unix_time FROM step WHERE {inside}) AS s"
            " WHERE step.generation = ? AND step.step = ?",
            (generation, first, last, generation, last),
        )
        database.execute("DELETE FROM step WHERE generation = ? AND step > ? AND step < ?", (generation, first, last))
        rows = database.execute(
            f"SELECT first_rank, names, matrix FROM part WHERE {inside}", (generation, first, last)
        ).fetchall()
        alike: dict[tuple[int, int], list[Matrix]] = {}
        for first_rank, names, content in rows:
            alike.setdefault((first_rank, names), []).append(np.frombuffer(content, dtype="<f4"))
        database.execute(f"DELETE FROM part WHERE {inside}", (generation, first, last))
        for (first_rank, names), matrices in alike.items():
            mean = np.mean(np.stack(matrices), axis=0, dtype=np.float64).astype("<f4").tobytes()
            database.execute("REPLACE INTO part VALUES (?, ?, ?, ?, ?)", (generation, last, first_rank, names, mean))

    def _names_id(self, columns: tuple[str, ...]) -> int:
        if columns not in self._names:
            text = json.dumps(columns)
            self._database.execute("INSERT OR IGNORE INTO names (columns) VALUES (?)", (text,))
            (self._names[columns],) = self._database.execute(
                "SELECT id FROM names WHERE columns = ?", (text,)
            ).fetchone()
        return self._names[columns]


@final
class TelemetryReader:
    """Reads a run's telemetry, while it is written or afterwards.  One thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the file of a run's folder.

        Raises:
            LaunchError: there is none, it is none of Weft's, or a newer Weft wrote it.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise LaunchError(
                f"{folder} has no {FILE_NAME}: the run was not recorded, or has not begun."
                " Runs are recorded unless run.telemetry = false, and sessions unless record=False."
            )
        self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0,
                                         isolation_level=None, check_same_thread=False)  # fmt: skip
        try:
            (version,) = self._database.execute("SELECT value FROM run WHERE key = 'version'").fetchone()
        except (sqlite3.Error, TypeError):
            raise LaunchError(f"{path} is no telemetry of Weft's. Remove it; the run needs it for nothing.") from None
        if int(version) > VERSION:
            raise LaunchError(
                f"{path} has version {version} of its tables, and this Weft reads up to {VERSION}. Install the Weft"
                " that wrote it."
            )
        self._names: dict[int, tuple[str, ...]] = {}

    def close(self) -> None:
        self._database.close()

    def generations(self) -> list[GenerationFacts]:
        """Return all generations, in order."""
        rows = self._database.execute("SELECT facts FROM generation ORDER BY number").fetchall()
        return [GenerationFacts(**json.loads(text)) for (text,) in rows]

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
    return (folder / FILE_NAME).is_file()


def _plain(facts: GenerationFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in GenerationFacts.__dataclass_fields__}
