"""What pages say of runs whose fault is known, of runs without telemetry, and of runs that grow or hang."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import MadeUpRun

from weft.errors import LaunchError
from weft.watch.run_record import RunRecord
from weft.watch.store import Gap
from weft.watch.views import PAGES, page_of


def blocks(record: RunRecord, page: str, **options: str) -> dict[str, dict[str, Any]]:
    made = page_of(record, page, options)
    json.dumps(made, allow_nan=False)
    for block in made["blocks"]:
        if block["kind"] == "controls":
            continue
        assert block["says"].endswith(".")
        if block["kind"] in ("lines", "bars", "heat", "gantt", "mesh", "timeline", "figures"):
            names = [column["name"] for column in block["table"]["columns"]]
            assert all(names)
            assert all(len(row) == len(names) for row in block["table"]["rows"])
    return {block["title"]: block for block in made["blocks"]}


@pytest.fixture
def slow_run(tmp_path: Path) -> MadeUpRun:
    run = MadeUpRun(folder=tmp_path / "run", data=4, pipeline=2, slow={(5, "forward"): 0.03})
    run.add(40)
    return run


def test_every_page_of_a_run_can_be_drawn(slow_run: MadeUpRun) -> None:
    record = RunRecord(slow_run.folder)
    for page in PAGES:
        assert blocks(record, page)


def test_the_slow_rank_is_named_where_one_looks_for_it(slow_run: MadeUpRun) -> None:
    record = RunRecord(slow_run.folder)
    first = blocks(record, "overview")
    assert "Rank 5 on host host-1 holds the step back" in first["What holds it back"]["verdicts"][0]["title"]
    assert first["Slowest ranks"]["table"]["rows"][0][:4] == ["5", "host-1", "pipeline 1, data 1", "forward"]
    assert "Highest in the median is rank 5" in blocks(record, "ranks")["Ranks over steps"]["says"]
    one = blocks(record, "ranks", rank="5")["Rank 5 by phase"]
    forward = next(row for row in one["table"]["rows"] if row[0] == "forward")
    assert float(forward[3]) == pytest.approx(30, abs=2)
    assert "rank 5 +4" in blocks(record, "mesh")["Hosts and ranks"]["says"]


def test_rows_are_ordered_by_axis_and_bad_options_count_as_none(slow_run: MadeUpRun) -> None:
    record = RunRecord(slow_run.folder)
    heat = blocks(record, "ranks", order="data", metric="own:forward")["Ranks over steps"]
    assert heat["rows"] == ["0", "4", "1", "5", "2", "6", "3", "7"]
    assert heat["cuts"] == [2, 4, 6]
    heat = blocks(record, "ranks", order="<script>", metric="../..", rank="99")["Ranks over steps"]
    assert heat["rows"] == [str(rank) for rank in range(8)]


def test_plan_and_measurement_sum_to_the_step(slow_run: MadeUpRun) -> None:
    record = RunRecord(slow_run.folder)
    rows = blocks(record, "plan")["Plan and measurement, by term"]["table"]["rows"]
    numbers = {row[0]: float(row[2]) for row in rows}
    step = numbers.pop("step")
    assert sum(numbers.values()) == pytest.approx(step, rel=0.02)
    assert step == pytest.approx(1e3 * record.usual_seconds, rel=0.02)
    traffic = blocks(record, "communication")["Traffic"]
    assert "Every row whose plan is known" in traffic["says"]


def test_two_runs_stand_side_by_side(slow_run: MadeUpRun, tmp_path: Path) -> None:
    other = MadeUpRun(folder=tmp_path / "other", data=4, pipeline=2)
    other.add(40)
    records = [RunRecord(slow_run.folder), RunRecord(other.folder)]
    made = page_of(records[0], "plan", {}, records[1:])
    beside = next(block for block in made["blocks"] if block["title"] == "Runs side by side")
    assert "other has the shortest step" in beside["says"]
    assert [row[0] for row in beside["table"]["rows"]] == ["run", "other"]
    losses = next(
        block for block in page_of(records[0], "training", {}, records[1:])["blocks"] if block["kind"] == "lines"
    )
    assert [series["name"] for series in losses["series"]] == ["run", "other"]


def test_what_comes_later_is_taken_in(slow_run: MadeUpRun) -> None:
    record = RunRecord(slow_run.folder)
    before = record.revision
    assert not record.refresh()
    slow_run.add(10)
    slow_run.event("evaluation", step=50, validation_loss=4.25, seconds=1.0, metrics={})
    assert record.refresh()
    assert record.revision == before + 1
    assert record.window.steps.tolist() == list(range(1, 51))
    assert "validation loss 4.250" in str(blocks(record, "events")["Everything that happened"]["table"]["rows"])
    slow_run.step = 30
    slow_run.begin(2)
    slow_run.add(5)
    slow_run.writer.gap(Gap(2, 3, 35, 1e9, 7, 0, 0, "the ring was full"))
    record.refresh()
    assert [row.step for row in record.steps] == list(range(1, 36))
    assert {row.generation for row in record.steps} == {1, 2}
    assert "7 spans are known to be lost" in blocks(record, "overview")["Recording"]["says"]


def test_a_run_without_telemetry_shows_what_rank_0_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no folder of a run"):
        RunRecord(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    for page in PAGES:
        assert blocks(RunRecord(tmp_path), page)
    report = {"kind": "step", "step": 10, "loss": 3.5, "step_seconds": 2.0, "unix_time_seconds": 1e9, "count": 8.0,
              "load": {"router": [0.5, 0.25, 0.25]}, "memory_bytes": 1 << 30}  # fmt: skip
    lines = [report, {**report, "step": 20, "loss": None}, {**report, "step": 20, "loss": 3.25}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "st'
    (tmp_path / "metrics.jsonl").write_text("no JSON\n[1]\n" + text)
    record = RunRecord(tmp_path)
    assert [(row.step, row.seconds, row.loss) for row in record.steps] == [(10, 2.0, 3.5), (20, 0.2, 3.25)]
    assert "no telemetry" in blocks(record, "overview")["Nothing is recorded"]["says"]
    assert "50 %" in blocks(record, "training")["Load of experts"]["says"]
    for page in PAGES:
        assert blocks(record, page)


def test_a_telemetry_file_that_is_none_is_told_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "telemetry.sqlite").write_bytes(b"no database")
    record = RunRecord(tmp_path)
    assert "no telemetry of Weft's" in blocks(record, "ranks")["Telemetry cannot be read"]["says"]


def test_of_a_run_that_stands_still_the_missing_rank_is_named(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path, began=20.0)
    run.add(30)
    run.live(stopped={2: "forward"})
    record = RunRecord(tmp_path)
    assert record.stall is not None
    assert record.stall.ranks == (2,)
    made = page_of(record, "hang")["blocks"]
    assert made[0]["kind"] == "banner"
    assert (
        "Rank 2 on host host-1 is in no collective; the others wait in all_reduce of the data axis" in made[0]["title"]
    )
    where = blocks(record, "hang")["Where ranks are"]["table"]["rows"]
    assert where[0][:1] + where[0][3:5] == ["2", "others wait for it", "forward"]
    assert page_of(record, "memory")["blocks"][0]["kind"] == "banner"


def test_a_recorder_that_lags_is_no_hang_and_is_told(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path, began=40.0)
    run.add(30)
    ahead = {"step": 31, "phase": "forward", "open": None, "has_begun": True, "has_ended": False, "completed": {}}
    for rank in range(4):  # ranks are a step farther than what is written
        run.writer.live(1, rank, time.time(), ahead)
    assert RunRecord(tmp_path).stall is None
    for rank in range(4):
        run.writer.live(1, rank, time.time() - 15, {**ahead, "step": 30})
    record = RunRecord(tmp_path)
    assert "The recorder has said nothing for 15s" in blocks(record, "overview")["Recording"]["says"]
