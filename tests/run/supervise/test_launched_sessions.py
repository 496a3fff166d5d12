"""Scripts under `weft launch` whose ranks fail: a session goes on from its newest save, to the losses of a run that
nobody disturbs; a script without one fails at once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.config.recipe import OnFailure
from weft.errors import LaunchError, PlanError
from weft.events import RunFolder
from weft.run.launch.launcher import ForkServer
from weft.run.launched_script import LaunchedScript
from weft.run.script_policies import policies_of
from weft.run.supervise.replan import ask_for_plan
from weft.run.supervised_script import SupervisedScript

SCRIPT = Path(__file__).with_name("launched_session.py")
STEPS = 20
PLAIN = """
import os, signal, sys
open(sys.argv[1], "a").write("x")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad luck")
"""


def launch(
    folder: Path,
    fork_server: ForkServer,
    *words: str,
    policies: OnFailure | None = None,
    script: Path = SCRIPT,
    restarts_any: bool = False,
    resumes: Path | None = None,
    processes: int = 2,
) -> int:
    launched = LaunchedScript(
        script=str(script), arguments=(str(folder), *words), num_processes=processes, logs=folder.with_suffix(".logs")
    )
    return SupervisedScript(
        launched=launched,
        policies=policies or OnFailure(),
        restarts_any=restarts_any,
        resumes=resumes,
        fork_server=fork_server,
    ).run()


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    lines = (json.loads(line) for line in text if line.endswith("\n"))
    return [line for line in lines if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    by_step = {line["step"]: line["loss"] for line in lines_of(folder, "step")}
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses under a plan that nobody disturbs."""
    known: dict[str, list[float]] = {}

    def of(plan: str) -> list[float]:
        if plan not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert launch(folder, fork_server, "--plan", plan) == 0
            known[plan] = losses(folder)
        return known[plan]

    return of


def at_step(folder: Path, step: int, act: Callable[[], object]) -> threading.Thread:
    """Do something beside the script once it has come to a step."""

    def watch() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if any(line["step"] >= step for line in lines_of(folder, "step")):
                act()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


DRAW = random.Random(39)
FAULTS = [
    *(
        (plan, "kill", DRAW.randrange(4, STEPS + 1), DRAW.randrange(2))
        for plan in ("data", "ZeRO-3", "tensor", "pipeline")
    ),
    ("data", "kill", 6, 1),  # the save before is that of the epoch's last step, with the schedule's step still to come
    ("data", "raise", 12, 0),
    ("tensor", "wait", 13, 1),
    ("data", "stop", 10, 1),
]


@pytest.mark.parametrize(("plan", "fault", "at", "rank"), FAULTS)
def test_a_session_goes_on_to_the_losses_of_an_undisturbed_run(
    undisturbed: Callable[[str], list[float]],
    fork_server: ForkServer,
    tmp_path: Path,
    plan: str,
    fault: str,
    at: int,
    rank: int,
) -> None:
    folder, save = tmp_path / "run", "5" if at == 6 else "3"
    words = ("--plan", plan, "--fault", fault, "--at", str(at), "--rank", str(rank), "--save", save)
    policies = OnFailure(hang_seconds=3.0 if fault in ("wait", "stop") else None)
    assert launch(folder, fork_server, *words, policies=policies) == 0
    assert losses(folder) == undisturbed(plan)
    first, *more = lines_of(folder, "generation")
    kinds = {"kill": "killed", "raise": "error", "wait": "hang", "stop": "hang"}
    finishes = fault == "stop"  # ranks of which one was stopped finish their step and save
    assert (first["failure"], first["rank"]) == (kinds[fault], rank)
    assert at <= first["failed_step"] <= at + finishes
    # A snapshot in memory may have come after the save.
    assert (at - 1) // int(save) * int(save) <= first["restored_step"] < at + finishes
    assert not more


def test_snapshots_in_memory_outlive_the_ranks_and_reach_the_disk_with_the_last_failure(
    undisturbed: Callable[[str], list[float]], fork_server: ForkServer, tmp_path: Path
) -> None:
    folder, words = (
        tmp_path / "run",
        ("--save", "5", "--fault", "kill", "--at", "10", "--times", "2", "--pause", "0.05"),
    )
    assert launch(folder, fork_server, *words, policies=policies_of([], 1)) == 128 + signal.SIGKILL
    (restart,) = lines_of(folder, "generation")
    assert restart["restored_step"] > 5
    newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert int(newest.removeprefix("step-")) >= restart["restored_step"]
    assert launch(folder, fork_server, resumes=folder) == 0
    assert losses(folder) == undisturbed("data")


@pytest.mark.parametrize(("loop", "at", "status"), [("while", 13, 0), ("count", 5, 0), ("count", 13, 1)])
def test_a_loop_that_counts_its_passes_goes_on_in_the_first_alone(
    undisturbed: Callable[[str], list[float]],
    fork_server: ForkServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    loop: str,
    at: int,
    status: int,
) -> None:
    folder = tmp_path / "run"
    assert launch(folder, fork_server, "--loop", loop, "--fault", "kill", "--at", str(at)) == status
    if status == 0:
        assert losses(folder) == undisturbed("data")
    else:
        said = capfd.readouterr().err
        assert "its loop counts passes through the data from the beginning" in said
        assert "step-000012 is saved. Go on with: weft launch --resume=" in said


def test_what_has_not_saved_fails_at_once(
    fork_server: ForkServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert launch(folder, fork_server, "--save", "0", "--fault", "kill", "--at", "7") == 128 + signal.SIGKILL
    assert not lines_of(folder, "generation")
    (tmp_path / "plain.py").write_text(PLAIN)
    assert launch(tmp_path / "count", fork_server, "kill", script=tmp_path / "plain.py") == 128 + signal.SIGKILL
    assert (tmp_path / "count").read_text() == "xx"
    assert capfd.readouterr().err.count("rank 1 of 2") == 2
    assert "restart" not in capfd.readouterr().out


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_whoever_asks_has_any_script_started_again(fork_server: ForkServer, tmp_path: Path, fault: str) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    assert launch(tmp_path / "count", fork_server, fault, script=tmp_path / "plain.py", restarts_any=True) == 0
    assert (tmp_path / "count").read_text() == "xxxx"


def test_policies_are_obeyed_and_named(
    fork_server: ForkServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--fault", "kill", "--at", "8", "--times", "9")
    policies = policies_of(["killed=stop,hang_seconds=60"], None)
    assert policies == OnFailure(killed="stop", hang_seconds=60.0)
    assert launch(tmp_path / "stops", fork_server, *words, policies=policies) == 128 + signal.SIGKILL
    assert "--on-failure killed=stop; killed=restart would start the script again." in capfd.readouterr().err
    assert launch(tmp_path / "loops", fork_server, *words, policies=policies_of([], 1)) == 128 + signal.SIGKILL
    assert "Restarting once has saved no new step after step 6 (--max-restarts 1)" in capfd.readouterr().err
    with pytest.raises(weft.WeftError, match="max_restart is not a setting. Did you mean max_restarts"):
        policies_of(["max_restart=3"], None)


def test_sigterm_saves_and_another_start_goes_on(
    undisturbed: Callable[[str], list[float]],
    fork_server: ForkServer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    thread = at_step(folder, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launch(folder, fork_server, "--pause", "0.05") == os.EX_TEMPFAIL
    thread.join()
    stopped = len(losses(folder))
    assert 7 <= stopped < STEPS
    assert f"stopped   step-{stopped:06d} is saved. Go on with: weft launch --resume=" in capfd.readouterr().out
    assert launch(folder, fork_server, resumes=folder) == 0
    assert losses(folder) == undisturbed("data")
    assert [line["step"] for line in lines_of(folder, "step")].count(stopped) == 1  # nothing was done twice


def test_sigterm_ends_a_script_that_saves_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    thread = at_step(folder, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launch(folder, fork_server, "--pause", "0.05", "--save", "0") == 128 + signal.SIGTERM
    thread.join()


@pytest.mark.parametrize("seed", range(3))
def test_a_session_goes_on_under_other_plans(
    undisturbed: Callable[[str], list[float]], fork_server: ForkServer, tmp_path: Path, seed: int
) -> None:
    draw, folder = random.Random(seed), tmp_path / "run"
    plans = {
        "tensor 2": weft.Plan.tensor(2),
        "pipeline 2": weft.Plan.pipeline(2),
        "ZeRO-3": weft.Plan.fsdp(shard=2),
        "data 1": weft.Plan.ddp(replicate=1),
    }
    names = draw.sample(sorted(plans), 2)

    def ask() -> None:
        for name in names:
            done = len(lines_of(folder, "generation"))
            assert "the ranks go on under it" in ask_for_plan(RunFolder(folder), plans[name])
            until = time.monotonic() + 60
            while len(lines_of(folder, "generation")) == done and time.monotonic() < until:
                time.sleep(0.02)

    thread = at_step(folder, draw.randrange(2, 5), ask)
    assert launch(folder, fork_server, "--pause", "0.3", "--save", "0") == 0
    thread.join()
    changes = lines_of(folder, "generation")
    assert [change["failure"] for change in changes] == ["replan"] * 2
    expected = undisturbed("data")
    assert len(losses(folder)) == STEPS
    assert all(abs(a - b) <= 2e-5 * abs(b) for a, b in zip(losses(folder), expected, strict=True))
    told = folder.with_suffix(".changes").read_text().splitlines()
    sizes = [2, *(plans[name].mesh.world_size for name in names)]
    for at, change in enumerate(changes):
        assert f"0 {sizes[at]} {sizes[at + 1]} {change['restored_step']}" in told
    assert len(told) == sizes[1] + sizes[2]


def test_a_plan_that_does_not_fit_is_refused_and_the_script_goes_on(
    undisturbed: Callable[[str], list[float]], fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    refused: list[str] = []

    def ask() -> None:
        try:
            ask_for_plan(RunFolder(folder), weft.Plan.ddp(replicate=3))
        except PlanError as problem:
            refused.append(str(problem))

    thread = at_step(folder, 3, ask)
    assert launch(folder, fork_server, "--pause", "0.1") == 0
    thread.join()
    assert "The run goes on under its plan." in refused[0]
    assert losses(folder) == undisturbed("data")
    assert not (folder / "supervisor.json").exists()
    with pytest.raises(LaunchError, match="no training runs in .* weft launch -n N --resume"):
        ask_for_plan(RunFolder(folder), weft.Plan.tensor(2))
