"""Writes a run's telemetry (`weft.watch.store`): the tables, and how old steps are thinned out."""

from __future__ import annotations

import json
import logging
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from weft.errors import LaunchError
from weft.watch.store import (
    VERSION,
    Gap,
    GenerationFacts,
    Matrix,
    StepDetail,
    StepRow,
    TelemetryReader,
    file_name,
    newest_file,
)

logger = logging.getLogger(__name__)

ROLL_UP_STEPS = 10
"""Steps that one row stands for once it is old."""
RAW_STEPS = 20_000
"""Newest steps of which every one has a row of its own."""
KEPT_DETAILS = 240
"""Newest steps whose spans are kept, before they are thinned out."""
_RETRY_SECONDS = 1.0
"""Time after which a disk that took nothing is tried again."""
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


@final
class TelemetryWriter:
    """Writes a run's telemetry.  One per run; any thread of its process, one at a time.

    Raises `sqlite3.Error` where the file cannot be written, such as on a full disk: the caller counts what is lost.
    """

    def __init__(self, folder: Path, number: int = 1, *, is_shared: bool = False) -> None:
        """Open or make the file of this number in a run's folder.  Where other hosts see the folder (`is_shared`) the
        file has no write-ahead log: that needs memory which the processes that read and write share."""
        self.path = folder / file_name(number)
        self._database = sqlite3.connect(self.path, isolation_level=None, timeout=1.0, check_same_thread=False)
        self._first_id = (number - 1) << 32
        """Numbers of rows differ between the files of a run: a reader joins them."""
        # A crash of the machine may cost the last seconds of telemetry, and never corrupts what was written before.
        mode = "TRUNCATE" if is_shared else "WAL"
        for pragma in (f"journal_mode = {mode}", "synchronous = NORMAL", "journal_size_limit = 16777216"):
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
        try:
            if kind is None:
                self._database.execute("COMMIT")
                return
        except sqlite3.Error:
            self._roll_back()
            raise
        self._roll_back()

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # a full disk has done so already
            self._database.execute("ROLLBACK")
        self._names.clear()  # rows that were taken back with the rest
        self._traffic.clear()

    def close(self) -> None:
        """Write the log back into the file, and close it."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        self._database.close()

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
        self._insert("gap", gap)

    def verdict(self, generation: int, step: int, unix_time: float, facts: Mapping[str, Any]) -> None:
        """Add a verdict (`weft.watch.verdicts.RunVerdict`)."""
        self._insert("verdict", (generation, step, unix_time, json.dumps(facts)))

    def _insert(self, kind: str, values: Sequence[Any]) -> None:
        """Add a row with a number of its own."""
        number, marks = f"(SELECT coalesce(max(id), {self._first_id}) + 1 FROM {kind})", ", ?" * len(values)
        self._database.execute(f"INSERT INTO {kind} VALUES ({number}{marks})", values)

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
            found = self._database.execute("SELECT id FROM names WHERE columns = ?", (text,)).fetchone()
            if found is None:
                self._insert("names", (text,))
                found = self._database.execute("SELECT id FROM names WHERE columns = ?", (text,)).fetchone()
            (self._names[columns],) = found
        return self._names[columns]


@final
class TelemetryFile:
    """The file that a collector writes."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: other hosts see the run's folder, and may have written files of their own."""
        self._is_shared = is_shared
        self._writer: TelemetryWriter | None = None
        self._number = 0
        """Number of the file; 0: it is not chosen yet."""
        self.earlier = 0
        """Generations of earlier starts of the run, which the telemetry has."""
        self.unwritten = 0
        """Steps that could not be written, since something could."""
        self._reason, self._retry_at = "", 0.0
        self._break: tuple[int, str] | None = None
        """Newest step of the file before, and a sentence on the time between; None: it is written, or there is none."""

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def write(self, folder: Path, number: int, newest: int, write: Callable[[TelemetryWriter], object]) -> bool:
        """Write into the file in a run's folder, all or nothing.  False: it could not be, and `unwritten` is to grow by
        what that has cost.  `number` is that of the generation since this start, and `newest` its newest step."""
        if time.monotonic() < self._retry_at:
            return False
        try:
            if self._writer is None:
                self._open(folder)
            assert self._writer is not None
            with self._writer as writer:
                generation, now = self.earlier + number, time.time()
                if self._break is not None:
                    writer.gap(Gap(generation, -1, self._break[0], now, 0, 0, 0, self._break[1]))
                if self.unwritten:
                    writer.gap(Gap(generation, -1, newest, now, 0, 0, self.unwritten, self._reason))
                write(writer)
            self.unwritten, self._break = 0, None
        except (sqlite3.Error, OSError) as problem:
            self._reason = f"the telemetry could not be written: {problem}"
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            return False
        return True

    def _open(self, folder: Path) -> None:
        if not self._number:
            before = newest_file(folder)
            # Only a file that this host alone has written is gone on with.
            self._number = before + 1 if before > 1 or (before and self._is_shared) else 1
            if before:
                self._read_earlier(folder)
        self._writer = TelemetryWriter(folder, self._number, is_shared=self._is_shared)

    def _read_earlier(self, folder: Path) -> None:
        """Read how far the telemetry has come.  What cannot be read is not counted on."""
        try:
            with closing(TelemetryReader(folder)) as reader:
                self.earlier, seen_at = reader.newest_generation(), reader.seen_at()
                if self._number > 1:
                    host, seconds = socket.gethostname(), max(time.time() - seen_at, 0.0) if seen_at else 0.0
                    text = f"the record goes on in {file_name(self._number)}, by host {host}"
                    text += f": {seconds:,.1f} s before were not recorded"
                    self._break = (reader.newest_step()[1], text)
        except (sqlite3.Error, LaunchError, ValueError, TypeError) as problem:
            logger.warning("earlier telemetry of the run cannot be read: %s", problem)

    def close(self) -> None:
        if self._writer is not None:
            with suppress(sqlite3.Error):
                with self._writer:
                    self._writer.end_live()
                self._writer.close()
            self._writer = None


def _plain(facts: GenerationFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in GenerationFacts.__dataclass_fields__}
