"""Trainings with everything on a disk that are killed, or find the disk full: what is said, and that nothing stays."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest
from e2e_kit import RECIPE, WEFT, Act, Done, watch, write_corpus

PLAN = """
[mesh]
shard = 2

[data_parallel]
zero = 3

[microbatch]
size = 4
per_step = 1

[memory]
offload = "{what}"
offload_to = "disk"
offload_folder = "away"

[compute]
device = "cpu"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offloaded")
    write_corpus(folder)
    (folder / "recipe.toml").write_text(RECIPE)
    for what in ("optimizer", "parameters", "activations", "parameters+activations"):
        (folder / f"{what}.toml").write_text(PLAN.format(what=what))
    return folder


def command_of(what: str, run: str) -> tuple[str, ...]:
    return (
        *(WEFT, "train", "recipe.toml", "--plan", f"{what}.toml", "--run-folder", run),
        *("--set", "recipe.run.log_every=1", "--set", "recipe.run.save_every=3"),
        *("--set", "recipe.run.on_failure.killed=stop"),
    )


def last_words(done: Done) -> list[str]:
    """What is printed below the last step."""
    begun = max(done.text.rfind("\nstep "), done.text.rfind("\nrun "))
    return done.text[begun:].splitlines()[2:]


@pytest.mark.parametrize("role", ["rank", "parent", "fork_server", "launcher"])
def test_a_killed_training_leaves_no_file_and_says_who_was_killed(home: Path, role: str) -> None:
    def kill(act: Act) -> None:
        Act(act.pids(role)[-1], act.mark).send(signal.SIGKILL)

    run = f"killed-{role}"
    done = watch(command_of("parameters+activations", run), home, until="step    5 ", act=kill)
    assert done.status != 0
    assert "Traceback" not in done.text
    assert list((home / "away").iterdir()) == []
    assert not list(home.rglob("offloaded-*"))
    if role != "launcher":  # then nobody is left to say anything
        assert "SIGKILL" in done.text or "that started the ranks" in done.text
        assert len(last_words(done)) <= 15
    again = watch((*command_of("optimizer", "unused")[:4], "--resume", run, "--set", "recipe.run.steps=8"), home)
    assert again.status == 0, again.text
    steps = [json.loads(line) for line in (home / run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in steps if line["kind"] == "step") == 8


@pytest.mark.parametrize("what", ["optimizer", "parameters", "activations"])
def test_a_disk_that_is_full_is_told_with_the_setting(home: Path, what: str) -> None:
    """Files may be 64 KB long: as on a full disk, room is refused; activations ask for theirs in the first forward."""
    command = shlex.join(command_of(what, f"full-{what}"))
    done = watch(("bash", "-c", f"ulimit -f 64; exec {command}"), home)
    assert done.status == 2, done.text
    assert "Traceback" not in done.text
    text = " ".join(done.text.split())
    assert 'offload_to = "disk" needs' in text
    assert '("File too large")' in text
    assert "Name another place by memory.offload_folder" in text
    assert len(last_words(done)) <= 15
    assert list((home / "away").iterdir()) == []
