"""Every example runs as its own text says, a few steps long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WEFT = str(BIN / "weft")


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command as a user would, with one thread per process, and return what it prints."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def losses_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


LAUNCHERS = {
    "launch": (WEFT, "launch", "-n", "2"),
    "torchrun": (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"),
}


@pytest.fixture(scope="module")
def own_loop_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What plain Python prints of each epoch."""
    return own_loop((sys.executable,), tmp_path_factory.mktemp("alone"))


def own_loop(launcher: Sequence[str], folder: Path) -> list[str]:
    script = ("examples/own_loop.py", "--epochs", "1", "--folder", str(folder))
    return re.findall(r"epoch \d.*", run(*launcher, *script))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_own_loop_is_the_same_under_every_launcher(launcher: str, own_loop_alone: list[str], tmp_path: Path) -> None:
    assert own_loop_alone
    assert own_loop(LAUNCHERS[launcher], tmp_path / launcher) == own_loop_alone


def test_two_models_in_one_loop() -> None:
    script = ["examples/adversarial.py", "--steps", "50"]
    alone, two = (
        re.findall(r"(?:critic|generator) ([\d.]+)", run(*launcher, *script))
        for launcher in ([sys.executable], [WEFT, "launch", "-n", "2"])
    )
    assert len(alone) == 2
    assert [float(loss) for loss in two] == pytest.approx([float(loss) for loss in alone], abs=2e-3)


def test_a_policy_generates_what_it_learns_from() -> None:
    script = ["examples/policy_gradient.py", "--steps", "100"]
    alone, two = (
        re.findall(r"loss (-?[\d.]+)  right ([\d.]+)", run(*launcher, *script))
        for launcher in ([sys.executable], [WEFT, "launch", "-n", "2"])
    )
    assert len(alone) == 2
    assert [float(loss) for loss, _ in two] == pytest.approx([float(loss) for loss, _ in alone], abs=2e-3)


def train(recipe: str, folder: Path, *arguments: str) -> list[float]:
    """Train an example for six steps and return their losses."""
    run(
        WEFT, "train", f"examples/{recipe}/recipe.toml", *arguments, "--run-folder", str(folder),
        "--set", "recipe.run.steps=6", "--set", "recipe.run.log_every=1",
        *(["--set", f"recipe.data.cache={folder.parent}"] if recipe != "digits" else []),
    )  # fmt: skip
    assert (folder / "export").is_dir()
    return losses_of(folder)


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [("own_module", ["--plan", "examples/own_module/plan.toml"]), ("digits", ["--processes", "2"])],
)
def test_recipes_train_as_on_one_process(recipe: str, arguments: list[str], tmp_path: Path) -> None:
    many = train(recipe, tmp_path / "many", *arguments)
    assert many == pytest.approx(train(recipe, tmp_path / "one", "--processes", "1"), rel=1e-4)
    assert many[-1] < many[0]


def test_a_hugging_face_model_trains(tmp_path: Path) -> None:
    losses = train("hf_llama", tmp_path / "run", "--plan", "examples/hf_llama/plan.toml")
    assert losses[-1] < losses[0]
