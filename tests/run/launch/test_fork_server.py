"""One fork server for several jobs: they share its imports and nothing else, and it ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pool
import pytest
from launch_kit import is_alive, job, parent_of, wait_for

from weft.errors import LaunchError, PlanError
from weft.run.launch.launcher import ForkServer, RankError, launch_function, open_fork_server


def test_jobs_of_different_kinds_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with ForkServer() as fork_server:
        first = launch_function(job("where_from"), {}, 2, threads_per_rank=1, fork_server=fork_server)
        with pytest.raises(PlanError, match="tensor = 3 does not divide"):
            launch_function(job("fail_with_plan_error"), {}, 2, fork_server=fork_server)
        with pytest.raises(RankError, match=r"rank 1 of 2 on host .* stopped: killed by SIGKILL"):
            launch_function(job("fail_on_rank_one"), {"kind": "kill"}, 2, fork_server=fork_server)
        monkeypatch.chdir(tmp_path)
        second = launch_function(job("where_from"), {}, 3, threads_per_rank=2, fork_server=fork_server)
        assert launch_function(job("add_up"), {"offset": 0}, 3, fork_server=fork_server)[2]["sum"] == 3.0
    (origin,) = {rank["fork_server"] for rank in (*first, *second)}
    assert fork_server.num_jobs == 5
    with pytest.raises(LaunchError, match="this fork server is closed.*start another"):
        launch_function(job("where_from"), {}, 1, fork_server=fork_server)
    assert origin != os.getpid()
    assert not is_alive(origin)
    assert [rank["rank"] for rank in second] == [0, 1, 2]
    assert {rank["threads"] for rank in first} == {1}
    assert {rank["threads"] for rank in second} == {2}
    assert {rank["folder"] for rank in second} == {str(tmp_path)}
    assert {rank["folder"] for rank in first} != {str(tmp_path)}


def test_the_environment_decides_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ForkServer() as fork_server:
        (rank,) = launch_function(job("where_from"), {}, 1, threads_per_rank=2, fork_server=fork_server)
    assert rank["threads"] == 1


def test_a_killed_fork_server_is_reported() -> None:
    with ForkServer() as fork_server:
        (rank,) = launch_function(job("where_from"), {}, 1, fork_server=fork_server)
        os.kill(rank["fork_server"], signal.SIGKILL)
        with pytest.raises(LaunchError, match="the process that started the ranks ended with status -9"):
            launch_function(job("where_from"), {}, 1, fork_server=fork_server)


OWNER = """
import sys
sys.path[:0] = {path!r}
from weft.run.launch.launcher import ForkServer, launch_function
with ForkServer() as fork_server:
    launch_function("launch_jobs:add_up", {{"offset": 0}}, 1, fork_server=fork_server)
    arguments = {{"folder": {folder!r}, "stubborn": False}}
    launch_function("launch_jobs:write_pid_and_wait", arguments, 1, fork_server=fork_server)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose fork server has finished a job and begins one that waits for Ctrl-C."""
    code = OWNER.format(path=sys.path, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def family_of(folder: Path) -> list[int]:
    """The waiting rank, its parent, and the fork server."""
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


def test_ranks_die_with_a_killed_fork_server(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    family = family_of(tmp_path)
    os.kill(family[-1], signal.SIGKILL)
    _, complaint = owner.communicate(timeout=20)
    assert "LaunchError: the process that started the ranks ended with status -9" in complaint
    assert wait_for(lambda: not any(is_alive(pid) for pid in family), 2.0)


def test_ctrl_c_before_there_are_ranks_reaches_them(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    assert wait_for(lambda: bool(pool.descendants(owner.pid)))
    fork_server = list(pool.descendants(owner.pid))
    owner.send_signal(signal.SIGINT)  # while torch is imported, for the first job
    _, complaint = owner.communicate(timeout=30)
    assert complaint.splitlines()[-1] == "KeyboardInterrupt"
    assert not (tmp_path / "pid0").exists()
    assert wait_for(lambda: not any(is_alive(pid) for pid in fork_server), 2.0)


def test_a_rank_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_fork_server() as own:
        assert own is not None
        with open_fork_server(own) as given:
            assert given is own
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with open_fork_server() as none:
        assert none is None
