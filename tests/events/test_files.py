"""What a run leaves behind, also when the disk is full."""

from __future__ import annotations

import datetime
import json
import logging
import resource
import stat
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.errors import LaunchError
from weft.events import Run, RunFolder, Sink, loggers_to
from weft.events.sinks.log import LogSink
from weft.events.sinks.metrics import MetricsWriter
from weft.events.sinks.warnings import WarningSink

DAY = datetime.date(2026, 11, 20)


@contextmanager
def file_size_limit(limit: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    made = list[RunFolder]()
    threads = [
        threading.Thread(target=lambda: made.append(RunFolder.create(tmp_path / "runs", "demo", date=DAY)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.path.name for run in made) == [f"demo-2026-11-20-{number}" for number in range(1, 9)]
    assert stat.S_IMODE(made[0].path.stat().st_mode) == 0o700
    assert RunFolder.open(made[0].path).log(3).name == "rank-3.log"


def test_a_run_name_cannot_lead_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"'../x' is no folder name. Use letters, digits"):
        RunFolder.create(tmp_path, "../x")
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be made: .*Give a folder that is writable"):
        RunFolder.create(tmp_path / "file", "demo", date=DAY)
    with pytest.raises(LaunchError, match="it does not exist"):
        RunFolder.open(tmp_path / "none")


def test_metrics_are_lines_that_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 1, "loss": 7.5, "phases": {"optimizer_seconds": 0.25}, "shares": [1.0, float("inf")]})
        assert lines(path) == [{"step": 1, "loss": 7.5, "phases": {"optimizer_seconds": 0.25}, "shares": [1.0, None]}]
        metrics.write({"step": 2, "loss": float("nan")})
    assert lines(path)[1] == {"step": 2, "loss": None}


def test_a_resumed_run_appends_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_lost_metrics_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics, caplog.at_level(logging.WARNING):
        metrics.write({"step": 1})
        with file_size_limit(path.stat().st_size + 5):  # room for a part of a line
            metrics.write({"step": 2, "text": "x" * 100})
            metrics.write({"step": 3, "text": "x" * 100})
        assert metrics.dropped == 2
        metrics.write({"step": 4})
        metrics.write({"step": 5})
    assert lines(path) == [{"step": 1}, {"step": 4, "dropped_lines": 2}, {"step": 5}]
    assert caplog.text.count("training goes on and lost lines are counted") == 1


def test_metrics_without_a_folder_lose_lines_and_nothing_else(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "none" / "metrics.jsonl") as metrics:
        metrics.write({"step": 1})
        assert metrics.dropped == 1


@contextmanager
def running(folder: Path, rank: int) -> Generator[Run]:
    """As a rank of `weft train` runs: its loggers lead into its log, and those of rank 0 to the terminal."""
    sinks: list[Sink] = [LogSink(folder / f"rank-{rank}.log")]
    with Run(rank, [*sinks, WarningSink()] if rank == 0 else sinks) as run, loggers_to(run, all_of_process=True):
        yield run


def test_each_rank_logs_to_its_file_and_rank_0_speaks_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("weft.somewhere")
    for rank in (0, 1):
        with running(tmp_path, rank):
            logger.info("a detail")
            logger.warning("rank %d has something to say", rank)
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.warn("from a library", stacklevel=1)
    said = capsys.readouterr().err
    assert said.startswith("rank 0 has something to say\n")
    assert "rank 1" not in said
    assert "from a library" in said
    log = (tmp_path / "rank-1.log").read_text()
    assert "Z rank 1 INFO weft.somewhere: a detail\n" in log
    assert "from a library" in log
    assert not logging.getLogger("weft").handlers


def test_a_log_on_a_full_disk_says_later_how_many_lines_it_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, 1):
        with file_size_limit(10):
            for _ in range(3):
                logging.getLogger("weft").warning("words that find no room " * 1000)
        logging.getLogger("weft").warning("there is room again")
        logging.getLogger("weft").warning("and still")
    assert capsys.readouterr().err == ""
    _begun, messages, *rest = (tmp_path / "rank-1.log").read_text().splitlines()
    assert messages.endswith("rank 1 WARNING weft: 3 lines before this one found no room")
    assert [line.rpartition(": ")[2] for line in rest] == ["there is room again", "and still"]
