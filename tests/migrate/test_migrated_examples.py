"""Scripts for Accelerate and Fabric beside the same for Weft: equal losses, on any number of ranks, for few lines."""

from __future__ import annotations

import difflib
import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import ROOT

FOLDER = ROOT / "examples" / "migrated"
KINDS = sorted(path.stem.removesuffix("_weft") for path in FOLDER.glob("*_weft.py"))
LINES = 10
"""A migrated script has so many lines that were not in the other's, in the median."""


REPLICAS = ("local_sgd",)
"""Kinds whose ranks step by themselves: on several ranks they learn something else, as processes of the peer do."""


def peer_of(kind: str) -> Path:
    (path,) = [path for path in FOLDER.glob(f"{kind}_*.py") if not path.stem.endswith("_weft")]
    return path


def losses_of(folder: Path, *command: str) -> list[float]:
    """Run a script in a folder of its own, and return the list that it prints last."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def launched(ranks: int, script: str) -> tuple[str, ...]:
    return str(Path(sys.executable).parent / "weft"), "launch", "-n", str(ranks), script


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_under_the_peer_and_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    script, peer = str(FOLDER / f"{kind}_weft.py"), peer_of(kind)
    alone = losses_of(tmp_path / "alone", sys.executable, script)
    together = {ranks: losses_of(tmp_path / str(ranks), *launched(ranks, script)) for ranks in (2, 4)}
    for ranks, found in together.items():
        assert (found == pytest.approx(alone, rel=2e-5)) != (kind in REPLICAS), ranks
    package = {"accelerate": "accelerate", "fabric": "lightning_fabric"}[peer.stem.rpartition("_")[2]]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed, so that {peer.name} cannot be run; ranks of Weft were compared")
    assert alone == pytest.approx(losses_of(tmp_path / "peer", sys.executable, str(peer)), rel=2e-5)
    for ranks, found in together.items() if kind in REPLICAS else ():
        of_peer = losses_of(tmp_path / f"peer {ranks}", *launched(ranks, str(peer)))
        assert found == pytest.approx(of_peer, rel=2e-5), ranks


def test_few_lines_change() -> None:
    written = {}
    for kind in KINDS:
        before = peer_of(kind).read_text().splitlines()[1:]
        after = (FOLDER / f"{kind}_weft.py").read_text().splitlines()[1:]
        lines = difflib.ndiff(before, after)
        written[kind] = sum(line.startswith("+ ") and bool(line[2:].strip()) for line in lines)
    assert statistics.median(written.values()) <= LINES, written
