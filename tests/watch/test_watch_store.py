"""What a collector writes is read as it was written, while it is written and afterwards."""

from __future__ import annotations

import resource
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import MadeUpRun

from weft.errors import LaunchError
from weft.watch.accounting import STATES, frontier, phase_names
from weft.watch.run_record import RunRecord
from weft.watch.store import Gap, TelemetryReader
from weft.watch.store_writer import TelemetryWriter
from weft.watch.verdicts import judge, judge_stall


def test_steps_are_read_while_they_are_written(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path)
    reader = TelemetryReader(tmp_path)
    assert reader.newest_step() == (0, 0)
    run.add(40)
    assert reader.newest_step() == (1, 40)
    window = reader.window(1, 11, 30)
    assert window.steps.tolist() == list(range(11, 31))
    assert window.values.shape[:2] == (20, 4)
    states = sum(window.column(name) for name in STATES)
    np.testing.assert_allclose(states, window.column("wall"), rtol=1e-5)
    assert len(reader.step_rows(after=(1, 10))) == 30
    assert reader.step_rows(most=10)[-1].step == 40
    assert reader.detailed_steps(1) == [10, 20, 30, 40]
    assert [detail.rank for detail in reader.details(1, 20)] == [0, 1, 2, 3]
    assert reader.traffic(1, 40)[3]["data"]["all_reduce"] == (2, 8_000_000)
    assert set(reader.live()) == {0, 1, 2, 3}
    run.writer.gap(Gap(1, 2, 40, 1.0, 10, 0, 0, "the ring was full"))
    assert reader.gaps()[0].reason == "the ring was full"
    run.end()
    assert reader.live() == {}
    assert reader.generations()[0].axes == {"data": 4}


def test_files_of_several_leaders_are_read_as_one(tmp_path: Path) -> None:
    first = MadeUpRun(folder=tmp_path, data=3)
    first.add(10)  # and its host is lost
    record = RunRecord(tmp_path)
    first.writer.gap(Gap(1, 2, 10, 1.0, 10, 0, 0, "the ring was full"))
    second = MadeUpRun(folder=tmp_path, data=2, file=2, generation=2, began=3_500.0, seed=1)
    second.step = 6
    second.add(20)
    second.writer.gap(Gap(2, -1, 10, 2.0, 0, 0, 0, "the record goes on"))
    with closing(TelemetryReader(tmp_path)) as reader:
        assert reader.newest_generation() == 2
        assert reader.newest_step() == (2, 26)
        assert [gap.reason for gap in reader.gaps()] == ["the ring was full", "the record goes on"]
        assert set(reader.live()) == {0, 1}, "the first leader's ranks are gone"
        assert [window.values.shape[:2] for window in (reader.window(1), reader.window(2))] == [(10, 3), (20, 2)]
        assert not np.isnan(reader.window(2).column("wall")).any()
    assert record.refresh()
    assert [row.step for row in record.steps] == list(range(1, 27))
    assert (record.num_ranks, len(record.generations), len(record.gaps)) == (2, 2, 2)
    record.close()
    # One that cannot be read is left out.
    (tmp_path / "telemetry-3.sqlite").write_bytes(b"not of SQLite" * 100)
    with closing(TelemetryReader(tmp_path)) as reader:
        assert [path.name for path in reader.paths] == ["telemetry.sqlite", "telemetry-2.sqlite"]


def test_what_a_full_disk_took_back_is_written_anew(tmp_path: Path) -> None:
    """The names of columns are written once: with a transaction that failed they are gone."""
    run = MadeUpRun(folder=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
    try:
        with pytest.raises(sqlite3.Error):
            run.add(2_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.step = 0
    run.add(20)
    with closing(TelemetryReader(tmp_path)) as reader:
        assert reader.newest_step() == (1, 20)
        assert not np.isnan(reader.window(1).column("wall")).any()
        assert reader.traffic(1, 20)[3]["data"]["all_reduce"] == (2, 8_000_000)


def test_missing_ranks_are_not_zero(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path)
    run.add(10, missing=frozenset({2}))
    window = TelemetryReader(tmp_path).window(1)
    assert np.isnan(window.column("wall")[:, 2]).all()
    assert not np.isnan(window.column("wall")[:, 1]).any()


def test_what_is_repeated_belongs_to_the_later_generation(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path)
    run.add(10)
    run.step = 6
    run.begin(2)
    run.add(10)
    reader = TelemetryReader(tmp_path)
    assert [(row.generation, row.step) for row in reader.step_rows()][9:12] == [(1, 10), (2, 7), (2, 8)]
    assert [facts.number for facts in reader.generations()] == [1, 2]


@pytest.mark.parametrize(("phase", "rank"), [("forward", 1), ("data_wait", 3), ("optimizer", 0), ("backward", 2)])
def test_a_slow_rank_is_named_with_its_phase(tmp_path: Path, phase: str, rank: int) -> None:
    run = MadeUpRun(folder=tmp_path, slow={(rank, phase): 0.03})
    run.add(25)
    reader = TelemetryReader(tmp_path)
    window = reader.window(1)
    first = judge(window, reader.generations()[0])[0]
    assert (first.kind, first.ranks, first.phase, first.confidence) == ("slow_rank", (rank,), phase, "high")
    assert 0.025 < first.seconds < 0.035
    line = frontier(window)
    np.testing.assert_allclose(line.seconds.sum(axis=1), window.column("wall").max(axis=1), rtol=0.01)
    assert line.phases == phase_names(window.columns)


def test_of_a_healthy_run_nothing_is_said(tmp_path: Path) -> None:
    for seed in range(10):
        run = MadeUpRun(folder=tmp_path / str(seed), seed=seed)
        run.add(30)
        reader = TelemetryReader(tmp_path / str(seed))
        assert [verdict.kind for verdict in judge(reader.window(1), reader.generations()[0])] == ["unknown"]


def test_old_steps_are_rolled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.watch.store_writer.RAW_STEPS", 30)
    run = MadeUpRun(folder=tmp_path)
    run.add(100)
    before = TelemetryReader(tmp_path).window(1)
    run.writer.thin_out(1, 100)
    reader = TelemetryReader(tmp_path)
    window = reader.window(1)
    assert window.steps.tolist() == [*range(10, 80, 10), *range(71, 101)][:37]
    assert window.num_steps.tolist() == [10] * 7 + [1] * 30
    np.testing.assert_allclose(window.values[0], before.values[:10].mean(axis=0), rtol=1e-5)
    assert sum(row.num_steps for row in reader.step_rows()) == 100


def test_what_is_no_telemetry_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="was not recorded"):
        TelemetryReader(tmp_path)
    (tmp_path / "telemetry.sqlite").write_bytes(b"no database at all")
    with pytest.raises(LaunchError, match=r"no telemetry of Weft's"):
        TelemetryReader(tmp_path)
    (tmp_path / "telemetry.sqlite").unlink()
    writer = TelemetryWriter(tmp_path)
    writer._database.execute("UPDATE run SET value = '2'")
    with pytest.raises(LaunchError, match="version 2"):
        TelemetryReader(tmp_path)


def test_a_stopped_rank_is_named_with_what_the_others_wait_in(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path)
    run.add(10)
    waits = {"axis": "data", "operation": "all_reduce", "num_bytes": 8, "seconds": 9.0, "number": 4}
    state = {
        "step": 9,
        "phase": "reduce_wait",
        "has_begun": True,
        "has_ended": False,
        "is_stopped": False,
        "open": waits,
    }
    facts = TelemetryReader(tmp_path).generations()[0]
    usual = {"stalled_seconds": 9.0, "step_seconds": [0.08] * 20}
    live = {rank: {**state, "completed": {}} for rank in range(4)}
    assert judge_stall(live, facts, stalled_seconds=2.0, step_seconds=[0.08] * 20) is None
    assert judge_stall(live, facts, stalled_seconds=9.0, step_seconds=[4.0] * 20) is None, "its steps take as long"
    unknown = judge_stall(live, facts, **usual)
    assert unknown is not None
    assert (unknown.ranks, unknown.confidence) == ((), "low")
    live[2] |= {"open": None, "phase": "forward"}
    outside = judge_stall(live, facts, **usual)
    assert outside is not None
    assert (outside.ranks, outside.phase, outside.axis) == ((2,), "forward", "data")
    after_a_stall = [*[0.08] * 17, 15.0]
    assert judge_stall(live, facts, stalled_seconds=9.0, step_seconds=after_a_stall) is not None
    live[1] |= {"is_stopped": True}
    stopped = judge_stall(live, facts, stalled_seconds=9.0, step_seconds=[4.0] * 20)
    assert stopped is not None
    assert "Rank 1 on host host-0 is stopped (SIGSTOP); the others wait in all_reduce of the data axis" in stopped.title
    live[3] |= {"has_ended": True}
    assert judge_stall({3: live[3]}, facts, **usual) is None
