"""`launch_function`: results and errors of real ranks, and what is left when something dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_kit import is_alive, job, parent_of, wait_for

from weft.errors import LaunchError, PlanError
from weft.run.launch.launcher import ForkServer, RankError, launch_function


def test_results_come_by_rank() -> None:
    results = launch_function(job("add_up"), {"offset": 2}, 3, threads_per_rank=1)
    assert results == [{"rank": rank, "sum": 9.0, "threads": 1} for rank in range(3)]


def test_ranks_listen_on_loopback_only(fork_server: ForkServer) -> None:
    listening_for_failures = [
        address for rank in launch_function(job("addresses"), {}, 2, fork_server=fork_server) for address in rank
    ]
    assert listening_for_failures
    assert {address.partition(":")[0] for address in listening_for_failures} == {"127.0.0.1"}


def test_error_of_all_ranks_keeps_class_and_message(fork_server: ForkServer) -> None:
    with pytest.raises(PlanError, match=r"^tensor = 3 does not divide num_heads = 8. Use 1, 2, 4 or 8.$"):
        launch_function(job("fail_with_plan_error"), {}, 2, fork_server=fork_server)


def test_error_of_one_rank_names_it(fork_server: ForkServer) -> None:
    with pytest.raises(PlanError, match=r"^rank 1 on host .*: only here$"):
        launch_function(job("fail_on_rank_one"), {"kind": "plan"}, 2, fork_server=fork_server)


def test_other_errors_are_told_in_15_lines(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match="rank 1 of 3 on host .* stopped: ValueError: a long story") as caught:
        launch_function(job("fail_on_rank_one"), {"kind": "error"}, 3, fork_server=fork_server)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 15
    assert any("fail_on_rank_one" in line for line in lines)
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")


def test_killed_rank_is_the_cause_though_others_complain_first(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 on host .* stopped: killed by SIGKILL. When nobody did that"):
        launch_function(job("fail_on_rank_one"), {"kind": "kill"}, 2, fork_server=fork_server)


def test_rank_that_leaves_without_a_word(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 on host .* stopped: exit code 9 without an error"):
        launch_function(job("fail_on_rank_one"), {"kind": "exit"}, 2, fork_server=fork_server)


def test_stubborn_rank_is_killed_after_a_failure(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 .* ValueError: first"):
        launch_function(job("hang_after_failure"), {}, 2, fork_server=fork_server)


def test_result_that_json_cannot_hold(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match="not JSON serializable"):
        launch_function(job("no_json"), {}, 1, fork_server=fork_server)


def test_unknown_function(fork_server: ForkServer) -> None:
    with pytest.raises(RankError, match="has no attribute 'missing'"):
        launch_function(job("missing"), {}, 1, fork_server=fork_server)


def test_logs_hold_what_ranks_print(tmp_path: Path, fork_server: ForkServer) -> None:
    launch_function(job("print_rank"), {}, 2, logs=tmp_path / "logs", fork_server=fork_server)
    assert (tmp_path / "logs" / "rank1.out").read_text().splitlines() == ["hello from 1", "trouble on 1"]
    assert not (tmp_path / "logs" / "rank0.out").exists()


def test_caller_works_while_ranks_run(tmp_path: Path, fork_server: ForkServer) -> None:
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    arguments = {"folder": str(tmp_path)}

    def meanwhile() -> None:
        assert wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_function(job("write_pid_and_wait"), arguments, 2, fork_server=fork_server, meanwhile=meanwhile)
    assert wait_for(lambda: not any(is_alive(int(file.read_text())) for file in files), 2.0)


def test_rank_that_fails_is_reported_after_what_the_caller_did_meanwhile(fork_server: ForkServer) -> None:
    done: list[str] = []
    with pytest.raises(RankError, match="rank 1 of 2 on host .* killed by SIGKILL"):
        launch_function(
            job("fail_on_rank_one"), {"kind": "kill"}, 2, fork_server=fork_server, meanwhile=lambda: done.append("here")
        )
    assert done == ["here"]


def test_no_processes() -> None:
    with pytest.raises(LaunchError, match="num_processes = 0: a job has at least 1 process"):
        launch_function(job("add_up"), {"offset": 0}, 0)


PARENT = """
import sys
sys.path[:0] = {path!r}
from weft.run.launch.launcher import launch_function
print(launch_function("launch_jobs:write_pid_and_wait", {arguments!r}, 2))
"""


def start_parent(folder: Path, *, stubborn: bool = False) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that launches two waiting ranks, and return it with the ranks' process ids."""
    arguments = {"folder": str(folder), "stubborn": stubborn}
    code = PARENT.format(path=sys.path, arguments=arguments)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    files = [folder / "pid0", folder / "pid1"]
    assert wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
    return parent, [int(file.read_text()) for file in files]


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent, pids = start_parent(tmp_path)
    parent.kill()
    parent.communicate()
    assert wait_for(lambda: not any(is_alive(pid) for pid in pids), 2.0)


def test_ranks_die_with_their_killed_parent(tmp_path: Path) -> None:
    parent, pids = start_parent(tmp_path)
    os.kill(parent_of(pids[0]), signal.SIGKILL)
    _, complaint = parent.communicate(timeout=20)
    assert "LaunchError: the process that started the ranks ended with status -9" in complaint
    assert wait_for(lambda: not any(is_alive(pid) for pid in pids), 2.0)


def test_interrupt_reaches_every_rank_once(tmp_path: Path) -> None:
    parent, _ = start_parent(tmp_path)
    parent.send_signal(signal.SIGINT)
    output, complaint = parent.communicate(timeout=20)
    assert (output.strip(), complaint) == ("['2', '2']", "")


def test_second_interrupt_kills(tmp_path: Path) -> None:
    parent, pids = start_parent(tmp_path, stubborn=True)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(signal.SIGINT)
    _, complaint = parent.communicate(timeout=20)
    assert complaint.strip().endswith("KeyboardInterrupt")
    assert not any(is_alive(pid) for pid in pids)
