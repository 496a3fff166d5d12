"""`weft metrics RUN --to parquet:FOLDER`: three tables in which every value of the record is found again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorded_runs import MadeUpRun

from weft.cli import build_app
from weft.errors import LaunchError
from weft.watch.exporters import export, open_exporter
from weft.watch.run_record import RunRecord

REPORT = {
    "kind": "step", "step": 1, "loss": 3.5, "gradient_norm": 1.25, "learning_rate": 1e-3, "count": 8, "skipped": False,
    "loss_scale": 1.0, "tokens_per_second": 4_000.5, "step_seconds": 2.0, "memory_bytes": 1 << 40,
    "unix_time_seconds": 1e9,
    "communication": {"data": {"count": 2, "bytes": 96, "exposed_seconds": 0.5}}, "load": {"router.0": [0.25, 0.75]},
}  # fmt: skip


def table(folder: Path, name: str) -> Any:
    return pq.read_table(folder / f"{name}.parquet")


def run_command(*words: str) -> None:
    build_app()(["metrics", *words], exit_on_error=False, result_action="return_value")


def write_lines(run: Path, *lines: dict[str, Any] | str) -> None:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    """A run of two stages, in whose steps 11 to 20 a rank is missing, and which was set back to step 30."""
    run = MadeUpRun(folder=tmp_path / 'a "run"', data=2, pipeline=2)
    run.add(10)
    run.add(10, missing=frozenset({3}))
    run.add(20)
    run.step = 30
    run.begin(2)
    run.add(5)
    run.end()
    return run


def test_every_value_of_the_record_is_a_cell(
    run: MadeUpRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.watch.exporters import parquet

    monkeypatch.setattr(parquet, "_VALUES", 1_000)  # several row groups, as a large run has
    run_command(str(run.folder), "--to", f"parquet:{tmp_path}/out")
    printed = capsys.readouterr().out
    assert "steps.parquet 180" in printed
    assert "exported up to step 35" in printed
    found = table(tmp_path / "out", "steps")
    assert pq.ParquetFile(tmp_path / "out" / "steps.parquet").num_row_groups > 5
    rows = {(row["generation"], row["step"], row["rank"]): row for row in found.to_pylist()}
    assert len(rows) == found.num_rows == 45 * 4
    record = RunRecord(run.folder)
    reader = parquet.TelemetryReader(run.folder)
    recorded = {field.metadata[b"recorded_as"].decode(): field for field in found.schema
                if b"recorded_as" in (field.metadata or {})}  # fmt: skip
    assert recorded["memory"].name == "memory_bytes"
    assert recorded["phase:reduce_wait"].name == "phase_reduce_wait_seconds"
    assert recorded["wall"].metadata[b"unit"] == b"seconds"
    for facts in record.generations:
        window = reader.window(facts.number)
        assert set(recorded) == set(window.columns)
        for (at, rank), _ in np.ndenumerate(window.values[:, :, 0]):
            row = rows[facts.number, int(window.steps[at]), rank]
            assert row["host"] == facts.ranks[rank]["host"]
            assert {"pipeline": row["axis_pipeline"], "data": row["axis_data"]} == facts.ranks[rank]["coordinates"]
            assert row["unix_time_seconds"] == window.unix_times[at]
            assert row["num_steps"] == window.num_steps[at]
            for column in window.columns:
                value = float(window.column(column)[at, rank])
                assert row[recorded[column].name] == (value if np.isfinite(value) else None)
    reader.close()
    assert rows[1, 15, 3]["wall_seconds"] is None
    assert {step for (number, step, _), row in rows.items() if number == 1 and row["repeated"]} == set(range(31, 41))


def test_reports_and_events_are_as_metrics_jsonl_has_them(run: MadeUpRun, tmp_path: Path) -> None:
    later = {**REPORT, "step": 2, "loss": None, "learning_rate": 1}
    again = {**REPORT, "step": 2, "loss": 3.25, "tokens_per_second": None, "auxiliary": {"balance": 0.5}}
    warning = {"kind": "warning", "text": "\ud800 <b>", "source": "weft", "unix_time_seconds": 7}
    odd = {"kind": ["list"], "step": "seven", "number": 1 << 80}
    write_lines(run.folder, REPORT, later, again, "no JSON", warning, odd, {"kind": "evaluation", "step": 2})
    export(RunRecord(run.folder), f"parquet:{tmp_path}/out")
    first, second, *others = table(tmp_path / "out", "reports").to_pylist()
    steps = {row.step: row for row in RunRecord(run.folder).steps}
    assert [row["step"] for row in others] == list(range(3, 36))  # which rank 0 did not report
    for row in others:
        for name in ("loss", "gradient_norm", "learning_rate", "loss_scale", "count"):
            assert row[name] == getattr(steps[row["step"]], name)
        assert row["tokens_per_second"] is None
    flat = {name: value for name, value in REPORT.items() if name not in ("kind", "communication", "load")}
    flat |= {f"communication.data.{name}": value for name, value in REPORT["communication"]["data"].items()}
    assert first == {**flat, "load.router.0": [0.25, 0.75], "auxiliary.balance": None}
    assert (second["step"], second["loss"], second["tokens_per_second"]) == (2, 3.25, None)
    assert second["auxiliary.balance"] == 0.5
    schema = table(tmp_path / "out", "reports").schema
    assert str(schema.field("loss").type) == "double"
    assert schema.field("communication.data.bytes").metadata[b"unit"] == b"bytes"
    assert schema.field("tokens_per_second").metadata[b"unit"] == b"per second"
    events = table(tmp_path / "out", "events").to_pylist()
    assert [(row["kind"], row["step"], row["unix_time_seconds"]) for row in events] == [
        ("warning", None, 7.0), ('["list"]', None, None), ("evaluation", 2, None),
    ]  # fmt: skip
    assert json.loads(events[0]["rest"]) == {"text": "\ud800 <b>", "source": "weft"}
    assert json.loads(events[1]["rest"]) == {"step": "seven", "number": 1 << 80}


@pytest.mark.parametrize("value", ["text", True, [1, "x"], {"a": None}, 1 << 80, [0.5, None], float("nan"), -3, 1e300])
def test_whatever_a_line_holds_a_table_is_made(tmp_path: Path, value: object) -> None:
    write_lines(tmp_path, {"step": 1, "odd": value}, {"step": 2, "odd": 1.5}, {"step": True}, {"step": 1 << 70})
    export(RunRecord(tmp_path), f"parquet:{tmp_path}/out")
    assert table(tmp_path / "out", "reports")["step"].to_pylist() == [1, 2]


def test_an_empty_run_has_tables_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text("")
    run_command(str(tmp_path), "--to", f"parquet:{tmp_path}/out")
    assert "no telemetry" in capsys.readouterr().out
    for name in ("steps", "reports", "events"):
        assert table(tmp_path / "out", name).num_rows == 0
    assert table(tmp_path / "out", "steps").column_names[:3] == ["generation", "step", "rank"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "events.parquet", "reports.parquet", "steps.parquet",
    ]  # fmt: skip


def test_a_followed_run_is_written_when_it_ends(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2)
    run.add(10)
    record = RunRecord(run.folder)
    assert record.state == "running"
    exporter = open_exporter(f"parquet:{tmp_path}/out", record)
    exporter.write((), list)
    assert not list((tmp_path / "out").iterdir())
    run.add(5)
    run.end()
    exporter.close()
    assert table(tmp_path / "out", "steps").num_rows == 30


def test_what_cannot_be_written_is_said(run: MadeUpRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(run.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written to: .*Name a folder"):
        open_exporter(f"parquet:{tmp_path}/file/out", record)
    (tmp_path / "out" / "steps.parquet").mkdir(parents=True)
    with pytest.raises(LaunchError, match="cannot be written to"):
        export(record, f"parquet:{tmp_path}/out")
    assert os.listdir(tmp_path / "out") == ["steps.parquet"]
    with pytest.raises(LaunchError, match="Did you mean parquet"):
        open_exporter("parqet:x", record)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LaunchError, match=r'pip install "weft\[parquet\]"'):
        open_exporter(f"parquet:{tmp_path}/out", record)
