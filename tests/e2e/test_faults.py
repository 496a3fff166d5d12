"""Processes of a training that are stopped and killed, drawn by seed: which one, how, and when.

Whatever comes: the run goes on by itself to the losses of the run that nobody disturbs, the first cause is named in at
most 15 lines, nothing outlives the command (`watch` looks), and what is stopped and goes on in time costs nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_kit import RECIPE, WEFT, Act, Done, watch, write_corpus

TIMEOUT_SECONDS = 6
TRAIN = (WEFT, "train", "recipe.toml", "--processes", "2")
DEADLINE = ("--set", f"plan.compute.collective_timeout_seconds={TIMEOUT_SECONDS}")
LONGER = ("--set", "recipe.run.steps=120", "--set", "recipe.run.log_every=1")
MOMENTS = {"start": "run ", "mid step": "step    3 ", "save": "step   40  saved", "end": "step  118 "}
DEEDS = ("STOP", "KILL", "STOP then CONT", "STOP then KILL")
ROLES = ("rank", "parent", "fork_server", "launcher")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[int, float]:
    """Losses of the run that nobody disturbs."""
    assert watch((*TRAIN, *LONGER, *DEADLINE, "--run-folder", "whole"), home).status == 0
    return losses(home / "whole")


def strike(role: str, deed: str, draw: random.Random, struck: list[int]) -> Callable[[Act], None]:
    """Do a deed to a drawn process of a role; what follows after a while is done in a thread."""

    def act(act: Act) -> None:
        until = time.monotonic() + 10
        while not (pids := act.pids(role)) and time.monotonic() < until:
            time.sleep(0.02)
        pid = draw.choice(pids)
        struck.append(pid)
        first, _, then = deed.partition(" then ")
        os.kill(pid, signal.Signals[f"SIG{first}"])
        if then:
            timer = threading.Timer(2.0, send, (pid, signal.Signals[f"SIG{then}"]))
            timer.daemon = True
            timer.start()
        elif role == "launcher" and first == "STOP":
            threading.Timer(3.0, send, (pid, signal.SIGKILL)).start()  # nobody else could end it

    return act


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in rows if line["kind"] == "step"}


def judge(done: Done, same: bool, role: str, deed: str) -> None:
    assert "Traceback" not in done.text, done.text
    if role == "launcher" and deed != "STOP then CONT":
        assert done.status != 0 or same
        return  # nobody is left to say anything
    assert done.status == 0, done.text
    assert same, "other losses"
    lines = done.text.splitlines()
    restarts = [index for index, line in enumerate(lines) if line.startswith("restart   generation ")]
    harmless = deed == "STOP then CONT" or (role in ("parent", "fork_server") and deed == "STOP")
    assert not restarts or not harmless, done.text
    named = {"rank": "SIGSTOP|SIGKILL", "parent": "that started the ranks", "fork_server": "that started the ranks"}
    for at in restarts:
        begun = max((index for index in range(at) if lines[index].startswith(("step ", "run "))), default=0)
        assert at - begun <= 16, done.text
        assert re.search(named[role], "\n".join(lines[begun:at])), done.text


@pytest.mark.parametrize("seed", range(20))
def test_drawn_faults(home: Path, whole: dict[int, float], seed: int) -> None:
    draw = random.Random(seed)
    role, deed, moment = ROLES[seed % 4], draw.choice(DEEDS), draw.choice(list(MOMENTS))
    run, struck = home / f"struck-{seed}", list[int]()
    command = (*TRAIN, *LONGER, *DEADLINE, "--run-folder", run.name)
    done = watch(command, home, until=MOMENTS[moment], act=strike(role, deed, draw, struck))
    try:
        judge(done, done.status != 0 or losses(run) == whole, role, deed)
    except AssertionError as wrong:
        raise AssertionError(f"{deed} to the {role} at {moment}: {wrong}\n{done.text}") from wrong
