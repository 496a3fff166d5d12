"""`launch_script` and `initialise_distributed`: the same script under Weft, torchrun and plain Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pool
import pytest

from weft.errors import LaunchError
from weft.run.launch import RankInfo
from weft.run.launch._job import RankExit
from weft.run.launch._report import MAX_LINES, first_cause, report
from weft.run.launch.launcher import launch_script

FOREIGN = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value), "arguments", sys.argv[1:])
if "fail" in sys.argv and dist.get_rank() == 1:
    raise ValueError("bad luck")
if "leave" in sys.argv:
    sys.exit(7 if dist.get_rank() == 0 else 0)
dist.barrier()
dist.destroy_process_group()
"""

ASKS = """
import os, socket
from weft.run.hosts.network import own_addresses
port = int(os.environ["MASTER_PORT"])
for own in own_addresses():
    with socket.socket() as asking:
        if asking.connect_ex((own.address, port)) == 0:
            print(own.address)
"""
"""Prints the addresses of this host at which the store of the job answers."""

OWN = """
import sys
import torch, torch.distributed as dist
from weft.run.launch import initialise_distributed
with initialise_distributed("cpu") as distributed:
    value = torch.ones(1)
    dist.all_reduce(value)
    # One write: under PYTHONUNBUFFERED print() writes word by word, and torchrun's ranks share one pipe.
    sys.stdout.write(f"rank {distributed.rank} of {distributed.world_size} sum {int(value)}\\n")
assert not dist.is_initialized()
"""


LOOP = """
import os, signal, sys, time
import torch, weft
from torch import nn
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=2, per_step=2))
model = nn.Linear(2, 2)
with weft.session(plan=plan, folder=sys.argv[1], quiet=True) as session:
    state = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(8, 2)], loss=lambda o, b: (o.sum(), len(o)),
        batch_size=8,
    )
    for batch in state.batches(1):
        state.step(batch)
    if session.rank == 1 and sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if session.rank == 1 and sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if session.rank == 0 and sys.argv[2] == "stopped":
        while "was stopped by a signal" not in (text := open(sys.argv[1] + "/launcher.log").read()
                                                if os.path.exists(sys.argv[1] + "/launcher.log") else ""):
            time.sleep(0.1)
        os.kill(int(text.split("(pid ")[1].split(")")[0]), signal.SIGCONT)
    if session.rank == 1 and sys.argv[2] == "raises":
        raise ValueError("bad luck")
"""


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [("killed", "SIGKILL", "killed by SIGKILL"), ("raises", "ValueError", "ValueError: bad luck"), ("stopped", "", "")],
)
def test_what_the_launcher_learns_is_in_the_folder_of_the_run(tmp_path: Path, how: str, error: str, text: str) -> None:
    script, folder = tmp_path / "loop.py", tmp_path / "run"
    script.write_text(LOOP)
    status = launch_script(str(script), [str(folder), how], 2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    failures = [line for line in lines if line["kind"] == "failure" and line["rank"] == 1]
    log = (folder / "launcher.log").read_text()
    if how == "stopped":
        assert (status, failures) == (0, [])
        assert "launcher WARNING weft.run.launch: rank 1 (pid " in log
        return
    assert status != 0
    assert [line["kind"] for line in lines][-1] == "failure"
    assert (failures[0]["error"], len(failures)) == (error, 1)
    assert text in failures[0]["text"]
    assert f"launcher ERROR weft: rank 1 of 2 on host {failures[0]['host']} stopped: " in log


@pytest.fixture
def foreign(tmp_path: Path) -> str:
    path = tmp_path / "foreign.py"
    path.write_text(FOREIGN)
    return str(path)


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def outputs(folder: Path, world: int) -> list[str]:
    return [(folder / f"rank{rank}.out").read_text() for rank in range(world)]


def test_script_that_knows_nothing_of_weft(foreign: str, tmp_path: Path) -> None:
    assert launch_script(foreign, ["--lr", "3"], 2, logs=tmp_path) == 0
    assert outputs(tmp_path, 2) == ["sum 2 arguments ['--lr', '3']\n"] * 2


def test_failure_is_printed_once(foreign: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_script(foreign, ["fail"], 3, logs=tmp_path) == 1
    complaint = capfd.readouterr().err
    assert complaint.startswith("rank 1 of 3 on host ")
    assert "ValueError: bad luck" in complaint
    assert complaint.count("stopped") == 1
    assert len(complaint.splitlines()) <= MAX_LINES
    assert "Traceback" in outputs(tmp_path, 3)[1]


def test_the_store_of_scripts_listens_on_loopback_alone(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(ASKS)
    assert launch_script(str(script), [], 1, logs=tmp_path) == 0
    assert (tmp_path / "rank0.out").read_text().split() == ["127.0.0.1"]


def test_exit_status_is_the_scripts(foreign: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_script(foreign, ["leave"], 2, logs=tmp_path) == 7
    assert "rank 0 of 2" in capfd.readouterr().err


def test_missing_script() -> None:
    with pytest.raises(LaunchError, match=r"there is no script absent.py"):
        launch_script("absent.py", [], 2)


def test_weft_under_weft_launch(own: str, tmp_path: Path) -> None:
    assert launch_script(own, [], 2, logs=tmp_path) == 0
    assert outputs(tmp_path, 2) == ["rank 0 of 2 sum 2\n", "rank 1 of 2 sum 2\n"]


def test_weft_under_plain_python(own: str) -> None:
    done = subprocess.run([sys.executable, own], capture_output=True, text=True, check=True)
    assert done.stdout == "rank 0 of 1 sum 1\n"


def test_weft_under_torchrun(own: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 sum 2", "rank 1 of 2 sum 2"]


def test_module_instead_of_script(tmp_path: Path) -> None:
    assert launch_script("this", [], 1, module=True, logs=tmp_path) == 0
    assert "Beautiful is better than ugly." in outputs(tmp_path, 1)[0]


def _use_existing_group() -> tuple[int, bool]:
    import torch.distributed as dist

    from weft.run.launch import initialise_distributed

    with initialise_distributed("cpu") as distributed:
        rank = distributed.rank
    return rank, dist.is_initialized()


def test_existing_group_is_left_alone(ranks: pool.RankPool) -> None:
    assert ranks.run(2, _use_existing_group) == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK = 2 is not below WORLD_SIZE = 2",
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK = 'one' in the environment is no number",
        ),
    ],
)
def test_half_an_environment(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        RankInfo.from_environment(environment)


def test_no_environment_is_no_place() -> None:
    assert RankInfo.from_environment({"LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    "text",
    [
        "Connection closed by peer",
        "The group of ranks 0, 1 cannot be formed: the process of rank 1 has died.",
        "An all_reduce cannot be finished: the process of rank 1 has died.",
    ],
)
def test_echoes_are_never_the_cause(text: str) -> None:
    echo = RankExit(rank=0, host="a", when=1.0, error="RuntimeError", message=text, status=1)
    cause = RankExit(rank=1, host="a", when=2.0, error="ValueError", message="bad", status=1)
    assert first_cause({0: 1, 1: 1, 2: 0}, {0: 1.0, 1: 2.0, 2: 3.0}, {0: echo, 1: cause, 2: None}) == cause


def test_report_fits_15_lines() -> None:
    cause = RankExit(
        rank=1, host="a", when=0, error="E", message="m\n" * 50, trace=[f"  t{i}" for i in range(40)], status=1
    )
    lines = report(cause, 4, Path("logs")).splitlines()
    assert len(lines) == MAX_LINES
    assert lines[0] == "rank 1 of 4 on host a stopped: E: m"
    assert lines[-1].endswith("rank1.out")


@pytest.mark.parametrize(("error", "letters"), [("RecipeError", 9_000), ("ValueError", 2_100)])
def test_what_to_do_is_never_cut_off(error: str, letters: int) -> None:
    message = "why " * 2_000 + "Use another."
    cause = RankExit(rank=1, host="a", when=0, error=error, message=message, trace=["  t"], status=1)
    first, trace = report(cause, 4, None).splitlines()
    assert first.endswith("Use another.")
    assert len(first) <= letters
    assert trace == "  t"


def test_the_last_line_of_a_long_error_is_kept() -> None:
    message = "\n".join(["bad", *["detail"] * 40, "Use another."])
    for error, most in (("ValueError", MAX_LINES), ("PlanError", 60)):
        cause = RankExit(rank=1, host="a", when=0, error=error, message=message, status=1)
        lines = report(cause, 4, None).splitlines()
        assert lines[-1] == "Use another."
        assert len(lines) <= most
