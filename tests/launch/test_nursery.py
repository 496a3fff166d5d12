"""One nursery for several jobs: they share its imports and nothing else, and it ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_kit import is_alive, job, parent_of, wait_for

import pool
from weft.errors import LaunchError, PlanError
from weft.launch.launcher import Nursery, RankError, launch_function, open_nursery


def test_jobs_of_different_kinds_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Nursery() as nursery:
        first = launch_function(job("where_from"), {}, 2, threads_per_rank=1, nursery=nursery)
        with pytest.raises(PlanError, match="tensor = 3 does not divide"):
            launch_function(job("fail_with_plan_error"), {}, 2, nursery=nursery)
        with pytest.raises(RankError, match=r"rank 1 of 2 on host .* stopped: killed by SIGKILL"):
            launch_function(job("fail_on_rank_one"), {"kind": "kill"}, 2, nursery=nursery)
        monkeypatch.chdir(tmp_path)
        second = launch_function(job("where_from"), {}, 3, threads_per_rank=2, nursery=nursery)
        assert launch_function(job("add_up"), {"offset": 0}, 3, nursery=nursery)[2]["sum"] == 3.0
    (origin,) = {rank["nursery"] for rank in (*first, *second)}
    assert nursery.num_jobs == 5
    with pytest.raises(LaunchError, match="this nursery is closed.*start another"):
        launch_function(job("where_from"), {}, 1, nursery=nursery)
    assert origin != os.getpid()
    assert not is_alive(origin)
    assert [rank["rank"] for rank in second] == [0, 1, 2]
    assert {rank["threads"] for rank in first} == {1}
    assert {rank["threads"] for rank in second} == {2}
    assert {rank["folder"] for rank in second} == {str(tmp_path)}
    assert {rank["folder"] for rank in first} != {str(tmp_path)}


def test_the_environment_decides_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Nursery() as nursery:
        (rank,) = launch_function(job("where_from"), {}, 1, threads_per_rank=2, nursery=nursery)
    assert rank["threads"] == 1


def test_a_nursery_that_was_killed_is_said() -> None:
    with Nursery() as nursery:
        (rank,) = launch_function(job("where_from"), {}, 1, nursery=nursery)
        os.kill(rank["nursery"], signal.SIGKILL)
        with pytest.raises(LaunchError, match="the process that started the ranks ended with status -9"):
            launch_function(job("where_from"), {}, 1, nursery=nursery)


OWNER = """
import sys
sys.path[:0] = {path!r}
from weft.launch.launcher import Nursery, launch_function
with Nursery() as nursery:
    launch_function("launch_jobs:add_up", {{"offset": 0}}, 1, nursery=nursery)
    launch_function("launch_jobs:write_pid_and_wait", {{"folder": {folder!r}, "stubborn": False}}, 1, nursery=nursery)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose nursery has finished a job and begins one that waits for Ctrl-C."""
    code = OWNER.format(path=sys.path, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def family_of(folder: Path) -> list[int]:
    """The waiting rank, its parent, and the nursery."""
    written = folder / "pid0"
    assert wait_for(lambda: written.is_file() and bool(written.read_text()))
    rank = int(written.read_text())
    return [rank, parent_of(rank), parent_of(parent_of(rank))]


def test_it_ends_with_its_owner(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    family = family_of(tmp_path)
    assert parent_of(family[-1]) == owner.pid
    owner.kill()
    owner.communicate()
    assert wait_for(lambda: not any(is_alive(pid) for pid in family), 3.0)


def test_ranks_die_with_a_killed_nursery(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    family = family_of(tmp_path)
    os.kill(family[-1], signal.SIGKILL)
    _, complaint = owner.communicate(timeout=20)
    assert "LaunchError: the process that started the ranks ended with status -9" in complaint
    assert wait_for(lambda: not any(is_alive(pid) for pid in family), 2.0)


def test_ctrl_c_before_there_are_ranks_reaches_them(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    assert wait_for(lambda: bool(pool.descendants(owner.pid)))
    nursery = list(pool.descendants(owner.pid))
    owner.send_signal(signal.SIGINT)  # while torch is imported, for the first job
    _, complaint = owner.communicate(timeout=30)
    assert complaint.splitlines()[-1] == "KeyboardInterrupt"
    assert not (tmp_path / "pid0").exists()
    assert wait_for(lambda: not any(is_alive(pid) for pid in nursery), 2.0)


def test_a_rank_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_nursery() as own:
        assert own is not None
        with open_nursery(own) as given:
            assert given is own
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with open_nursery() as none:
        assert none is None
