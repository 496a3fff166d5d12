"""Parquet: a run's whole record as three tables, for notebooks and databases.

- `steps.parquet`: a row per generation, step and rank, with every column of the record.
- `reports.parquet`: a row per step: what all ranks agreed on, and what rank 0 reported of it in `metrics.jsonl`.
- `events.parquet`: every other line of `metrics.jsonl`.

What is not known is null, and never zero.  Fields say their unit and their meaning in their metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from weft.errors import LaunchError
from weft.files import written_aside
from weft.version import VERSION
from weft.watch.accounting import column_meaning
from weft.watch.exporters._exporter import load_library
from weft.watch.metrics import RunMetric, Scalar
from weft.watch.run_record import RunRecord, is_report, objects_of, without_repeats
from weft.watch.store import GenerationFacts, StepRow, StepWindow, TelemetryReader, has_telemetry

WHERE = "FOLDER"
_EXTRA = "parquet"
_VALUES = 8_000_000
"""Values of the record that are held, and written as one row group: 32 MB."""
_LARGEST = 2**63
_NUMBERS = ("int64", "float64")
_NARROWER = {"float64": "int64"}
_UNITS = {"seconds": "seconds", "bytes": "bytes", "second": "per second"}
"""Unit of a report's column by the last word of its name."""


class TableField(NamedTuple):
    """One column of a table."""

    name: str
    kind: str
    """Name of its Arrow type."""
    about: str
    unit: str = ""
    recorded: str = ""
    """Name of the column in the record (`weft.watch.accounting`); empty where it has none."""


@final
class ParquetExporter:
    """Writes the tables when it is closed: a Parquet file is whole or none."""

    def __init__(self, folder: str, record: RunRecord) -> None:
        self._arrow: Any = load_library("pyarrow", _EXTRA)
        self._parquet: Any = load_library("pyarrow.parquet", _EXTRA)
        self._folder, self._record = Path(folder), record
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(self._folder, error) from None

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`.  Nothing is written before the end."""

    def close(self) -> None:
        """See `Exporter`.  Raises `LaunchError` where the folder cannot be written to."""
        try:
            reports, events = _lines(self._record)
            counts = {"steps": self._write_steps(reports)}
            counts["reports"] = self._write("reports", *_report_table([reports[step] for step in sorted(reports)]))
            counts["events"] = self._write("events", *_event_table(events))
        except OSError as error:
            raise _not_writable(self._folder, error) from None
        told = ", ".join(f"{name}.parquet {count:,}" for name, count in counts.items())
        why = "" if has_telemetry(self._record.folder.path) else "; the run has no telemetry, so no rows of steps"
        print(f"rows: {told}{why}")

    def _write_steps(self, reports: dict[int, dict[str, Any]]) -> int:
        """Write the table of steps and ranks, and add to `reports` the steps that rank 0 did not report."""
        path = self._record.folder.path
        if not has_telemetry(path):
            return self._write("steps", _step_fields((), ()), iter(()))
        with closing(TelemetryReader(path)) as reader:
            steps = reader.recorded_steps()
            columns = reader.columns()  # after the steps, so that these have no others
            facts = {facts.number: facts for facts in reader.generations()}
            axes = tuple(dict.fromkeys(axis for each in facts.values() for axis in each.axes))
            for row in without_repeats(reader.step_rows(most=_LARGEST)):
                reports.setdefault(row.step, _agreed(row))
            pieces = _step_pieces(reader, steps, facts, axes, columns)
            return self._write("steps", _step_fields(axes, columns), pieces)

    def _write(self, name: str, fields: Sequence[TableField], pieces: Iterator[Mapping[str, Any]]) -> int:
        """Write one table, a row group per piece (values by column), and return the number of its rows."""
        arrow, count = self._arrow, 0
        schema = arrow.schema([self._field(field) for field in fields], self._about())
        with (
            written_aside(self._folder / f"{name}.parquet") as aside,
            self._parquet.ParquetWriter(aside, schema) as writer,
        ):
            for piece in pieces:
                # Of arrays nan is what is not known; a list has None there.
                arrays = [arrow.array(piece[field.name], field.type, from_pandas=True) for field in schema]
                table = arrow.Table.from_arrays(arrays, schema=schema)
                writer.write_table(table)
                count += table.num_rows
        return count

    def _field(self, field: TableField) -> Any:
        kind = self._arrow.list_(self._arrow.float64()) if field.kind == "list" else getattr(self._arrow, field.kind)()
        about = {"description": field.about, "unit": field.unit, "recorded_as": field.recorded}
        return self._arrow.field(field.name, kind, metadata={key: text for key, text in about.items() if text})

    def _about(self) -> dict[str, str]:
        about = {"weft.run": self._record.name, "weft.version": VERSION}
        return {key: _sound_text(text) for key, text in about.items()}


def _agreed(row: StepRow) -> dict[str, Any]:
    """Return what all ranks agreed on in a step, under the names of `metrics.jsonl`."""
    names = ("step", "loss", "gradient_norm", "learning_rate", "loss_scale", "count")
    end = row.unix_time + row.seconds * row.num_steps
    return {name: getattr(row, name) for name in names} | {"skipped": row.skipped > 0, "unix_time_seconds": end}


def _lines(record: RunRecord) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Return reports by step, and all other lines of `metrics.jsonl`; of two reports of one step the later counts."""
    try:
        content = record.folder.metrics.read_bytes()
    except FileNotFoundError:
        return {}, []
    reports: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for values in objects_of(content[: content.rfind(b"\n") + 1]):
        if not is_report(values):
            events.append(values)
        elif _kind_of([values.get("step")]) == "int64":
            while reports and next(reversed(reports)) >= values["step"]:
                reports.popitem()
            reports[values["step"]] = values
    return reports, events


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _step_fields(axes: Sequence[str], columns: Sequence[str]) -> list[TableField]:
    fields = [
        TableField("generation", "int32", "membership of the job, counted from 1"),
        TableField("step", "int64", "finished steps, this one included"),
        TableField("rank", "int32", "rank in its generation"),
        TableField("host", "string", "host of the rank"),
        *(TableField(f"axis_{axis}", "int32", f"place of the rank on mesh axis {axis}") for axis in axes),
        TableField("unix_time_seconds", "float64", "begin of the step on the rank that began first", "seconds"),
        TableField("num_steps", "int64", "steps that the row is the mean of; step is the last of them"),
        TableField("repeated", "bool_", "whether a later generation did the step again"),
    ]
    for column in columns:
        unit, about = column_meaning(column)
        fields.append(TableField(f"{column.replace(':', '_')}_{unit}", "float32", about, unit, column))
    return fields


def _step_pieces(
    reader: TelemetryReader,
    steps: Mapping[int, Sequence[int]],
    known: Mapping[int, GenerationFacts],
    axes: Sequence[str],
    columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of consecutive steps, by step and rank."""
    for generation, all_steps in steps.items():
        later = [numbers[0] for number, numbers in steps.items() if number > generation]
        facts = known.get(generation) or GenerationFacts(number=generation, unix_time=0.0, world_size=0)
        size = max(1, _VALUES // (max(facts.world_size, 1) * max(len(columns), 1)))
        for at in range(0, len(all_steps), size):
            chosen = all_steps[at : at + size]
            window = reader.window(generation, chosen[0], chosen[-1], most=len(chosen))
            if window.values.shape[1]:
                yield _step_rows(window, facts, axes, columns, min(later, default=None))


def _step_rows(
    window: StepWindow, facts: GenerationFacts, axes: Sequence[str], columns: Sequence[str], again_from: int | None
) -> dict[str, Any]:
    """Return the columns of a window's rows; steps from `again_from` were done again."""
    num_steps, num_ranks = window.values.shape[:2]
    abouts = [facts.ranks[rank] if rank < len(facts.ranks) else {} for rank in range(num_ranks)]
    rows: dict[str, Any] = {
        "generation": np.full(num_steps * num_ranks, window.generation),
        "step": np.repeat(window.steps, num_ranks),
        "rank": np.tile(np.arange(num_ranks), num_steps),
        "host": [about.get("host") for about in abouts] * num_steps,
        "unix_time_seconds": np.repeat(window.unix_times, num_ranks),
        "num_steps": np.repeat(window.num_steps, num_ranks),
        "repeated": np.repeat(
            np.full(num_steps, False) if again_from is None else window.steps >= again_from, num_ranks
        ),
    }
    for axis in axes:
        rows[f"axis_{axis}"] = [about.get("coordinates", {}).get(axis) for about in abouts] * num_steps
    nothing = np.full(num_steps * num_ranks, np.nan, np.float32)
    for field in _step_fields((), columns):
        if field.recorded:
            has = field.recorded in window.columns
            rows[field.name] = window.column(field.recorded).ravel() if has else nothing
    return rows


# ── lines of metrics.jsonl ───────────────────────────────────────────────────────────────────────────────────────────


def _report_table(reports: Sequence[Mapping[str, Any]]) -> tuple[list[TableField], Iterator[Mapping[str, Any]]]:
    """Return the table of reports: what is inside of an object has a column of its own, `communication.data.bytes`."""
    flat = [dict(_flat(report)) for report in reports]
    names = dict.fromkeys(["step", *(name for values in flat for name in values if name != "kind")])
    fields: list[TableField] = []
    columns: dict[str, list[Any]] = {}
    for name in names:
        values = [values.get(name) for values in flat]
        kind = "int64" if name == "step" else _kind_of(_known(values))
        unit = _UNITS.get(name.rpartition(".")[2].rpartition("_")[2], "")
        key = _sound_text(name)
        fields.append(TableField(key, kind, f"{key} of metrics.jsonl", unit))
        columns[key] = [_converted(value, kind) for value in values]
    return fields, iter([columns] if reports else [])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _kind_of(values: Sequence[Any]) -> str:
    """Return the Arrow type that holds all of a column's values; text where they are of no one kind."""
    if all(isinstance(value, bool) for value in values):
        return "bool_" if values else "float64"
    if any(isinstance(value, bool) for value in values):
        return "string"
    if all(isinstance(value, int) and -_LARGEST <= value < _LARGEST for value in values):
        return "int64"
    if all(isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST) for value in values):
        return "float64"
    return (
        "list" if all(isinstance(value, list) and _kind_of(_known(value)) in _NUMBERS for value in values) else "string"
    )


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _converted(value: Any, kind: str) -> Any:
    """Return a value of `metrics.jsonl` as a column of this kind takes it."""
    if value is None or kind in ("bool_", "int64", "list"):
        return value
    if kind == "float64":
        return float(value)
    return _sound_text(value) if isinstance(value, str) else json.dumps(value)


def _event_table(events: Sequence[Mapping[str, Any]]) -> tuple[list[TableField], Iterator[Mapping[str, Any]]]:
    fields = [
        TableField("kind", "string", "kind of the event"),
        TableField("step", "int64", "finished steps when it came; null where it belongs to none"),
        TableField("unix_time_seconds", "float64", "when it was told", "seconds"),
        TableField("rest", "string", "its other values, as JSON"),
    ]
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    for event in events:
        rest = dict(event)
        for name, kind in (("kind", "string"), ("step", "int64"), ("unix_time_seconds", "float64")):
            fits = event.get(name) is not None and _kind_of([event[name]]) in (kind, _NARROWER.get(kind))
            columns[name].append(_converted(rest.pop(name), kind) if fits else None)
        columns["rest"].append(json.dumps(rest))
    return fields, iter([columns] if events else [])


def _sound_text(text: str) -> str:
    """Return a text that UTF-8 can hold, whatever a name was made of."""
    return text.encode("utf-8", "replace").decode()


def _not_writable(folder: Path, error: OSError) -> LaunchError:
    return LaunchError(f"{folder} cannot be written to: {error.strerror or error}. Name a folder you may write.")


def create(target: str, record: RunRecord) -> ParquetExporter:
    """See `weft.watch.exporters`."""
    return ParquetExporter(target, record)
