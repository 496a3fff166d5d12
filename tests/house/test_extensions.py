"""A technique, a family, a sink and a launcher are a folder or a file each: put in beside the others, or taken out.

What is put in here lies outside of the tree.  What is taken out is taken out of a copy of it, together with the lines
that `docs/concepts/extending.md` names.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from pages import ROOT

from weft.errors import LaunchError
from weft.events import Listening, MessageEvent, Run, RunFolder, sinks_of
from weft.model.families import families, family_of
from weft.run.launch import RankInfo

Put = Callable[[str, str], None]
TOY_SINK = """
class Counter:
    def __init__(self, path):
        self.path, self.count = path, 0
    def take(self, emitted):
        self.count += 1
    def close(self):
        self.path.write_text(str(self.count))

def create(run):
    return None if run.folder is None else Counter(run.folder.path / "count")
"""
TOY_LAUNCHER = """
from weft.run.launch import RankInfo

def rank_info(environment):
    rank = environment.get("TOY_RANK")
    return None if rank is None else RankInfo(int(rank), 8, int(rank) % 4, 4, address="toy:1234")
"""
TOY_FAMILY = """
from weft.model.families import Family

class Toy(Family):
    model_types = ("toy", "toy_moe")

FAMILY = Toy()
"""


@pytest.fixture
def put(tmp_path: Path) -> Generator[Put]:
    """Put a file called `toy` beside those of a package, from a folder elsewhere, until the test ends."""
    packages: list[str] = []

    def add(package: str, text: str) -> None:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "toy.py").write_text(text)
        importlib.import_module(package).__path__.append(str(folder))
        packages.append(package)

    yield add
    for package in packages:
        importlib.import_module(package).__path__.pop()
        sys.modules.pop(f"{package}.toy", None)


def test_a_sink_is_a_file(put: Put, tmp_path: Path) -> None:
    put("weft.events.sinks", TOY_SINK)
    with Run(1, list(sinks_of(Listening(rank=1, folder=RunFolder(tmp_path))))) as run:
        run.emit(MessageEvent(text="hello"))
    assert (tmp_path / "count").read_text() == "1"
    assert not list(sinks_of(Listening(rank=1)))


def test_a_launcher_is_a_file(put: Put) -> None:
    put("weft.run.launch.launchers", TOY_LAUNCHER)
    assert RankInfo.from_environment({"TOY_RANK": "5"}) == RankInfo(5, 8, 1, 4, address="toy:1234")


def test_a_family_is_a_file(put: Put) -> None:
    put("weft.model.families", TOY_FAMILY)
    found = family_of("toy_moe")
    assert found is not None
    assert found.model_types == ("toy", "toy_moe")
    assert found in list(families())


def test_a_launcher_that_is_not_there_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.run.launch.launchers.__path__", [str(tmp_path)])
    with pytest.raises(LaunchError, match=r"RANK is set, but by no launcher that Weft knows \(it has none\)"):
        RankInfo.from_environment({"RANK": "0"})
    assert RankInfo.from_environment({}) is None


# ── taken out ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TAKEN_OUT = ("techniques/local_steps", "model/families/gpt_neox.py", "events/sinks/terminal.py")
TAKEN_OUT_TOO = "run/launch/launchers/torchrun.py"
LINES = {
    "config/plan/_plan.py": (
        "from weft.techniques.local_steps.settings import LocalStepsSettings\n",
        "LocalStepsSettings, ",
    ),
    "techniques/registry.py": (
        "from weft.techniques.local_steps.contract import LocalSteps\n",
        "    LocalSteps(),\n",
    ),
}
"""All that speaks of the technique outside of its folder."""
WITHOUT = """
import sys
import weft.api.planning.settings, weft.planning.search, weft.verify.program, weft.events, weft.cli._main
from weft.api.planning.settings import PlanSettings
from weft.config.plan import parse_plan
from weft.errors import WeftError
from weft.model.families import family_of, families
from weft.run.launch import RankInfo
from weft.techniques.registry import TECHNIQUES

def refused(what):
    try:
        what()
    except WeftError as error:
        print(error)

assert "local_steps" not in " ".join(sys.modules) and len(TECHNIQUES) == 12
assert family_of("gpt_neox") is None and len(list(families())) >= 4
refused(lambda: parse_plan("[data_parallel]\\nlocal_steps = 4\\n"))
refused(lambda: PlanSettings(local_steps=4).pins(8, 2))
refused(lambda: RankInfo.from_environment({"RANK": "0", "WORLD_SIZE": "2"}))
assert parse_plan("[data_parallel]\\nzero = 3\\n").data_parallel.round_length == 0
"""


def test_weft_does_without_what_is_taken_out(tmp_path: Path) -> None:
    copy = tmp_path / "weft"
    shutil.copytree(ROOT / "src" / "weft", copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in (*TAKEN_OUT, TAKEN_OUT_TOO):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, lines in LINES.items():
        text = (copy / name).read_text()
        for line in lines:
            assert text.count(line) == 1, (name, line)
            text = text.replace(line, "")
        (copy / name).write_text(text)
    mentions = [path for path in copy.rglob("*.py") if "techniques.local_steps" in path.read_text(encoding="utf-8")]
    assert not mentions
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    unknown, asked, launched = done.stdout.strip().splitlines()
    assert "data_parallel.local_steps is not a setting" in unknown
    assert "local_steps = 4 asks for a technique that this Weft does not have" in asked
    assert "by no launcher that Weft knows (weft_launch)" in launched
