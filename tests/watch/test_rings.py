"""What a rank records is read from outside: while it runs, when the ring has come round, and after it was killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.events.ring import NUM_NAMES, Capacities, RankRing, StepScalars, ring_path
from weft.watch.accounting import STATES, RankRecords, account
from weft.watch.collector import Collector
from weft.watch.rings import RingReader, steps_of
from weft.watch.store import TelemetryReader

SCALARS = StepScalars(2.5, 1.0, 1e-3, 1.0, 64.0, skipped=False)


def take_step(recorder: Recorder, step: int, *, seconds: float = 0.004) -> None:
    """One step: half of it forward, a quarter a wait for others in the backward, the rest the optimizer."""
    recorder.begin_ring_step()
    with recorder.span("data_wait"):
        pass
    with recorder.span("forward_backward"):
        with recorder.action("forward"):
            time.sleep(seconds / 2)
        with recorder.action("backward"):
            seen = TraceEvent("data", "all_reduce", 4_000)
            recorder.collectives.add(seen)
            entered = seen.enter_wait()
            time.sleep(seconds / 4)
            seen.exit_wait(entered)
    with recorder.span("optimizer"):
        time.sleep(seconds / 4)
    recorder.end_ring_step(step, 1 << 20, SCALARS)


def test_a_step_is_accounted_for(tmp_path: Path) -> None:
    recorder = Recorder(ring=RankRing.create(ring_path(tmp_path, 3), 3))
    reader = RingReader(ring_path(tmp_path, 3))
    assert (reader.rank, reader.pid, reader.has_new_steps) == (3, os.getpid(), False)
    for step in range(1, 6):
        take_step(recorder, step)
    new = reader.read()
    columns = account(RankRecords(steps_of(new.steps), new.spans, new.collectives, reader.names), ["data"],
                      has_pipeline=False)  # fmt: skip
    assert new.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert new.steps["loss"].tolist() == [2.5] * 5
    assert np.all(columns["phase:forward"] >= 0.002)
    assert np.all(columns["waits:backward"] >= 0.001)
    assert np.all(columns["phase:backward"] - columns["waits:backward"] < columns["waits:backward"])
    np.testing.assert_allclose(columns["exposed:data"], columns["waits:backward"])
    np.testing.assert_allclose(sum(columns[name] for name in STATES), columns["wall"], rtol=1e-9)
    phases = sum(column for name, column in columns.items() if name.startswith("phase:"))
    np.testing.assert_allclose(phases, columns["wall"], rtol=1e-9)
    assert (new.lost_spans, new.lost_collectives, new.lost_steps) == (0, 0, 0)
    assert len(reader.read().steps) == 0


def test_what_the_ring_overwrote_is_counted(tmp_path: Path) -> None:
    recorder = Recorder(ring=RankRing.create(ring_path(tmp_path, 0), 0, Capacities(16, 4, 8)))
    reader = RingReader(ring_path(tmp_path, 0))
    for step in range(1, 21):
        take_step(recorder, step, seconds=0.0)
    new = reader.read()
    assert new.steps["step"].tolist() == list(range(13, 21))
    assert new.lost_steps == 12
    assert new.lost_spans == 20 * 5 - 16
    assert new.lost_collectives == 16


def test_too_many_names_share_the_last(tmp_path: Path) -> None:
    ring = RankRing.create(ring_path(tmp_path, 0), 0)
    numbers = [ring.name(f"name {number}") for number in range(NUM_NAMES + 5)]
    assert numbers == [*range(NUM_NAMES - 1), *[NUM_NAMES - 1] * 6]
    assert RingReader(ring_path(tmp_path, 0)).names[-2:] == [f"name {NUM_NAMES - 2}", "…"]


def test_a_killed_rank_leaves_what_it_did_and_where_it_was(tmp_path: Path) -> None:
    """The child holds the interpreter in a wait, is read from outside, and is killed in it."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        recorder = Recorder(ring=RankRing.create(ring_path(tmp_path, 0), 0))
        recorder.ring.begin(0)
        take_step(recorder, 1)
        with recorder.span("forward_backward"), recorder.action("backward"):
            seen = TraceEvent("tensor", "all_reduce", 1_234)
            recorder.collectives.add(seen)
            seen.enter_wait()
            os.write(done, b"x")
            signal.pause()
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    reader = RingReader(ring_path(tmp_path, 0))
    for kill in (False, True):
        if kill:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert reader.phase()[0] == "backward"
        is_open = reader.open_collective(time.perf_counter_ns())
        assert is_open is not None
        assert is_open[:3] == ("tensor", "all_reduce", 1_234)
        assert (reader.step, reader.has_begun, reader.has_ended) == (1, True, False)
    assert reader.read().steps["step"].tolist() == [1]


def test_a_collector_writes_what_is_there(tmp_path: Path) -> None:
    rings, run = tmp_path / "rings", tmp_path / "run"
    (rings / "1").mkdir(parents=True)
    run.mkdir()
    collector = Collector(lambda: run, rings)
    recorders = [Recorder(ring=RankRing.create(ring_path(rings / "1", rank), rank)) for rank in range(2)]
    for step in range(1, 4):
        for recorder in recorders:
            take_step(recorder, step)
    take_step(recorders[0], 4)
    collector.poll()
    reader = TelemetryReader(run)
    assert reader.newest_step() == (1, 3), "the fourth is not finished on every rank"
    collector.close()
    assert reader.newest_step() == (1, 4)
    window = reader.window(1)
    assert np.isnan(window.column("wall")[3, 1])
    assert not np.isnan(window.column("wall")[:3]).any()
    assert reader.traffic(1, 4)[0] == {"data": {"all_reduce": (1, 4_000)}}
    # A run that goes on later counts its generations on.
    later = Collector(lambda: run, rings)
    for recorder in recorders:
        take_step(recorder, 5)
    later.close()
    assert reader.newest_step()[0] == 2


def test_a_disk_that_takes_nothing_is_no_fault_of_the_run(tmp_path: Path) -> None:
    rings, run = tmp_path / "rings", tmp_path / "run"
    (rings / "1").mkdir(parents=True)
    recorder = Recorder(ring=RankRing.create(ring_path(rings / "1", 0), 0))
    collector = Collector(lambda: run, rings)
    take_step(recorder, 1)
    collector.poll()  # there is no such folder
    run.mkdir()
    take_step(recorder, 2)
    time.sleep(1.1)
    collector.poll()
    collector.close()
    reader = TelemetryReader(run)
    assert reader.newest_step() == (1, 2)
    (gap,) = reader.gaps()
    assert gap.steps == 1
    assert "could not be written" in gap.reason


@pytest.mark.parametrize("content", [b"", b"\0" * 64_000, os.urandom(64_000)])
def test_what_is_no_ring_is_not_read(tmp_path: Path, content: bytes) -> None:
    ring_path(tmp_path, 0).write_bytes(content)
    with pytest.raises(ValueError, match="ring|empty"):
        RingReader(ring_path(tmp_path, 0))
