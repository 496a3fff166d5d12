"""What the documentation says can be run runs: commands marked so, and the Python of every page."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Fence, commands, fences

BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONWARNINGS": "default"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a clone, in which runs may be left behind."""
    for name in ("examples", "Makefile", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


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
