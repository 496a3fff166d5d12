"""The command line: status 2 and one paragraph for what a user can mend, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli import mark_script, run

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
WEFT = str(Path(sys.executable).with_name("weft"))


def complain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail as the user's mistake, and return what it says."""
    assert run(list(arguments)) == 2
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said
    assert "\n\n" not in said
    return said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian", "x.toml"), 'Did you mean "train"?'),
        (("train",), "RECIPE"),
        (("train", "absent.toml"), "absent.toml does not exist"),
        (("train", str(DEMO / "recipe.toml"), "--procesess", "2"), "Did you mean --processes?"),
        (("train", str(DEMO / "recipe.toml"), "--processes", "two"), "two"),
        (("train", str(DEMO / "recipe.toml"), "--plan", "absent.toml"), "absent.toml does not exist"),
        (("train", str(DEMO / "recipe.toml"), "--set", "plan.mesh.tensor=3"), "Use 1, 2 or 4."),
        (("train", str(DEMO / "recipe.toml"), "--set", "recipe.run.setps=3"), "Did you mean steps?"),
        (("train", str(DEMO / "recipe.toml"), "--set", "recipe.run.steps"), "gives no value"),
        (("train", str(DEMO / "recipe.toml"), "--plan", str(DEMO / "plan.toml"), "--processes", "4"), "8"),
        (("plan", str(DEMO / "recipe.toml"), "--cluster", "4x8xh1000"), "h100"),
        (("plan", str(DEMO / "recipe.toml"), "--output", "/proc/absent/plan.toml"), "cannot be written"),
        (("replan", str(DEMO)), "nothing is to change. Give a plan by --plan"),
        (("replan", str(DEMO), "--set", "recipe.run.steps=3"), "a run that goes on keeps its recipe"),
        (("replan", str(DEMO), "--set", "plan.mesh.tensor=1"), "no training runs in"),
        (("replan", "absent", "--set", "plan.mesh.tensor=1"), "absent is no folder of a run: it does not exist."),
        (("launch", "script.py"), "say how many processes"),
        (("launch", "-n", "2", "absent.py"), "there is no script absent.py"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in complain(capsys, *arguments)


def test_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "plan.toml"
    assert run(["plan", str(DEMO / "recipe.toml"), "--processes", "2", "--output", str(written)]) == 0
    assert "data 2 = 2 processes" in capsys.readouterr().out
    assert "replicate = 2" in written.read_text()


def test_demo_plan_has_three_axes_and_fits_its_recipe() -> None:
    from weft.config.plan import load_plan
    from weft.config.recipe import load_recipe
    from weft.model.description import facts_of
    from weft.techniques.check import check_plan

    recipe, plan = load_recipe(DEMO / "recipe.toml"), load_plan(DEMO / "plan.toml")
    check_plan(plan, recipe, facts_of(recipe), 8)
    assert (plan.mesh.pipeline, plan.mesh.data, plan.mesh.tensor) == (2, 2, 2)


@pytest.mark.parametrize(
    "command",
    ["", "train", "plan", "check", "generate", "export", "replan", "checkpoint", "launch", "data", "data prepare"],
)
def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([*command.split(), "--help"]) == 0
    most = 72 if command == "plan" else 45  # it answers many questions
    assert 5 < len(capsys.readouterr().out.splitlines()) <= most


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("weft 0.")


def test_a_terminal_without_dots_gets_question_marks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [WEFT, "plan", "examples/demo/recipe.toml", "--top", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cores  ?  " in done.stdout
    assert done.stdout.isascii()


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen([WEFT, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, complaint = process.communicate(timeout=20)
    assert complaint == ""
    assert process.returncode in (1, 141)  # 1: rich met the closed pipe first, and left


@pytest.mark.parametrize(
    ("given", "marked"),
    [
        ("launch -n 2 a.py --help", "launch -n 2 -- a.py --help"),
        ("launch --logs=x a.py -n 3", "launch --logs=x -- a.py -n 3"),
        ("launch -n 2 -- a.py", "launch -n 2 -- a.py"),
        ("launch --help", "launch --help"),
        ("train a.toml", "train a.toml"),
    ],
)
def test_what_follows_a_script_is_its_own(given: str, marked: str) -> None:
    assert mark_script(given.split()) == marked.split()


def test_axes_given_by_set_come_before_what_auto_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    demo = "examples/demo/recipe.toml"
    assert run(["plan", demo, "--set", "plan.mesh.tensor=2", "--processes", "4"]) == 0
    messages = capsys.readouterr().out
    assert "data 2 × tensor 2 = 4 processes" in messages
    assert "compute.threads_per_rank = 1" in messages
    wrong = complain(capsys, "plan", demo, "--set", "plan.mesh.tensor=2", "--processes", "3")
    assert "--processes 3 is no multiple of the 2 ranks" in wrong
    assert wrong.strip().endswith("Use --processes 2.")
