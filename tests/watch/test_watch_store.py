"""What a collector writes is read as it was written, while it is written and afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_runs import MadeUpRun

from weft.errors import LaunchError
from weft.watch.accounting import STATES, frontier, phase_names
from weft.watch.store import Gap, TelemetryReader, TelemetryWriter
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
    monkeypatch.setattr("weft.watch.store.RAW_STEPS", 30)
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
    live[1] |= {"is_stopped": True}
    stopped = judge_stall(live, facts, **usual)
    assert stopped is not None
    assert "Rank 1 on host host-0 is stopped (SIGSTOP); the others wait in all_reduce of the data axis" in stopped.title
    live[3] |= {"has_ended": True}
    assert judge_stall({3: live[3]}, facts, **usual) is None
