"""Commands, settings and links of the documentation exist; its Python runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Fence, anchors, commands, fences

from weft.cli._launch import mark_script
from weft.cli._main import build_app
from weft.cluster import parse_cluster
from weft.document import dump
from weft.plan import Plan, parse_plan
from weft.recipe import BatchRecipe, DecoderShape, ModelRecipe, Recipe, RunRecipe, parse_recipe

BIN = Path(sys.executable).parent
SHELL = {"git", "cd", "cp", "pip", "ls"}
"""Programs of which the pages say nothing that could go stale."""


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONWARNINGS": "default"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a clone, in which runs may be left behind."""
    for name in ("examples", "Makefile", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("fence", fences("console"), ids=str)
def test_commands_are_valid(fence: Fence) -> None:
    assert commands(fence), "a console fence without a command"
    for command in commands(fence):
        check_command(shlex.split(command))


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "weft":
        assert "--help" in arguments or build_app().parse_args(
            mark_script(arguments), exit_on_error=False, print_error=False
        )
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets)
    elif program in ("python", "torchrun"):
        pass
    else:
        assert program in SHELL, f"what is {program}?"
    for word in words:
        if word.startswith(("examples/", "docs/")):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("fence", [f for f in fences("console") if f.note == "run"], ids=str)
def test_commands_run(fence: Fence, checkout: Path) -> None:
    for command in commands(fence):
        done = subprocess.run(
            shlex.split(command), cwd=checkout, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr, done.stderr


PYTHON = {page: [f for f in fences("python") if f.page == page and not f.note.startswith("not run")] for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=lambda page: page.name)
def test_python_runs(page: Path, checkout: Path) -> None:
    """The fences of a page are one program, in their order.  It stands in a file, as ranks must be able to import."""
    script = checkout / "page.py"
    script.write_text("\n\n".join(fence.text for fence in PYTHON[page]))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=checkout,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fence", fences("toml"), ids=str)
def test_settings_exist(fence: Fence) -> None:
    """A fence says by a comment in its first line which file it is, or is part of."""
    kind, _, _ = fence.text.partition("\n")
    document = tomllib.loads(fence.text)
    if kind.startswith("# recipe.toml"):
        base = Recipe(
            model=ModelRecipe(shape=DecoderShape(num_layers=2, hidden_size=64, num_heads=4)),
            batch=BatchRecipe(global_batch_size=8),
            run=RunRecipe(steps=1000),
        )
        parse_recipe(completed(base, document))
    elif kind.startswith("# cluster.toml"):
        parse_cluster(fence.text)
    else:
        assert kind.startswith("# plan.toml"), f"{fence}: say `# recipe.toml`, `# plan.toml` or `# cluster.toml` first"
        parse_plan(completed(Plan(), document))


def completed(base: Recipe | Plan, part: dict[str, Any]) -> str:
    """TOML with the sections of `base` that `part` leaves out."""
    whole = {**tomllib.loads(dump(base, descriptions=False)), **part}
    return "\n".join(spelled(section, values) for section, values in whole.items())


def spelled(section: str, values: dict[str, Any]) -> str:
    from weft.document import spell

    return f"[{section}]\n" + "\n".join(f"{name} = {spell(value)}" for name, value in values.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target
