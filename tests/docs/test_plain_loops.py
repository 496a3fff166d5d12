"""Plain PyTorch's loops beside the same in a session: the same losses under every plan, for few lines."""

from __future__ import annotations

import difflib
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, fences

FOLDER = ROOT / "examples" / "plain"
KINDS = sorted(path.stem.removesuffix("_weft") for path in FOLDER.glob("*_weft.py"))
DRAWING = {"vae": 0.1, "siamese": 0.05}
"""Loops whose model or data set draws: numbers keyed by sample, which are others than plain PyTorch's.  Their last loss
comes as near to it as this."""
IN_FP64 = ("dcgan",)
"""Loops in which Adam makes whole steps of what rounding leaves of a gradient."""
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "four": (4, {}),
    "zero-3": (2, {"data_parallel.zero": 3}),
}
_LINE = re.compile(r"^(?:epoch|step|iter|test) .*", re.M)


def written(script: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """A script whose session has settings."""
    folder.mkdir()
    kind, text = script.stem.removesuffix("_weft"), script.read_text()
    if kind in IN_FP64:
        settings = {**settings, "compute.precision": "fp64"}
        text = text.replace("torch.float32", "torch.float64")
        text = text.replace("torch.manual_seed(", "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(")
    more = f"settings={settings}, permit=('fp64',)" if kind in IN_FP64 else f"settings={settings}"
    path = folder / script.name
    path.write_text(text.replace("weft.session()", f"weft.session({more})") if settings else text)
    return path


def losses_of(script: Path, *launcher: str) -> list[list[float]]:
    """Run a script in its folder, and return the numbers of each line that it prints of its training."""
    environment = {**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    command = (*(launcher or (sys.executable,)), str(script))
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return [[float(each) for each in re.findall(r"\d+\.\d+", line)] for line in _LINE.findall(done.stdout)]


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[float]]]:
    """The losses of a kind of loop in a session of one process, which are those of plain PyTorch."""
    known: dict[str, list[list[float]]] = {}

    def losses(kind: str) -> list[list[float]]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            plain = losses_of(written(FOLDER / f"{kind}.py", folder / "plain", {}))
            known[kind] = alone = losses_of(written(FOLDER / f"{kind}_weft.py", folder / "alone", {}))
            assert len(plain) == len(alone) > 4
            if kind in DRAWING:
                assert alone[-1] == pytest.approx(plain[-1], rel=DRAWING[kind])
            else:
                assert alone == [pytest.approx(line, rel=2e-6, abs=2e-6) for line in plain]
        return known[kind]

    return losses


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_plain_pytorch_under_every_plan(
    kind: str, plan: str, by_one_process: Callable[[str], list[list[float]]], tmp_path: Path
) -> None:
    script, weft = FOLDER / f"{kind}_weft.py", str(Path(sys.executable).parent / "weft")
    alone, (ranks, settings) = by_one_process(kind), PLANS[plan]
    found = losses_of(written(script, tmp_path / plan, settings), weft, "launch", "-n", str(ranks))
    assert found == [pytest.approx(line, rel=2e-5, abs=2e-5) for line in alone]


def test_few_lines_change() -> None:
    new: dict[str, int] = {}
    for kind in KINDS:
        before, after = ((FOLDER / f"{kind}{end}.py").read_text().splitlines()[1:] for end in ("", "_weft"))
        lines = difflib.ndiff(before, after)
        new[kind] = sum(line.startswith("+ ") and bool(line[2:].strip()) for line in lines)
    assert statistics.median(new.values()) <= 6, new
    assert max(new.values()) <= 8, new


def test_the_guide_has_the_whole_scripts() -> None:
    named = {fence.note.removeprefix("not run: "): fence.text for fence in fences("python")}
    for name in ("mnist", "mnist_weft"):
        path = f"examples/plain/{name}.py"
        assert named[path] == (ROOT / path).read_text().rstrip("\n"), path
