"""Scripts in the way of Accelerate and Fabric, whose import alone is Weft's: equal losses, on any number of ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT

FOLDER = ROOT / "examples" / "migrated"
KINDS = sorted(path.stem for path in FOLDER.glob("*.py"))
PEERS = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
REPLICAS = ("local_sgd_accelerate",)
"""Those whose ranks step by themselves: on several ranks they learn something else, as processes of the peer do."""


def of_peer(script: Path, folder: Path) -> Path:
    """The same script for the peer: the name in its imports is another."""
    peer = PEERS[script.stem.rpartition("_")[2]]
    text, changed = re.subn(r"^from weft\.(accelerate|fabric)\b", f"from {peer}", script.read_text(), flags=re.M)
    assert 1 <= changed <= 3
    assert "weft" not in text
    path = folder / script.name
    path.write_text(text)
    return path


def losses_of(folder: Path, *command: str) -> list[float]:
    """Run a script in a folder of its own, and return the list that it prints last."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def launched(ranks: int, script: Path) -> tuple[str, ...]:
    return str(Path(sys.executable).parent / "weft"), "launch", "-n", str(ranks), str(script)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_under_the_peer_and_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    script = FOLDER / f"{kind}.py"
    alone = losses_of(tmp_path / "alone", sys.executable, str(script))
    together = {ranks: losses_of(tmp_path / str(ranks), *launched(ranks, script)) for ranks in (2, 4)}
    for ranks, results in together.items():
        assert (results == pytest.approx(alone, rel=2e-5)) != (kind in REPLICAS), ranks
    package = PEERS[kind.rpartition("_")[2]]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed, so that {kind} cannot be run under it; ranks of Weft were compared")
    peer = of_peer(script, tmp_path)
    assert alone == pytest.approx(losses_of(tmp_path / "peer", sys.executable, str(peer)), rel=2e-5)
    for ranks, results in together.items() if kind in REPLICAS else ():
        theirs = losses_of(tmp_path / f"peer {ranks}", *launched(ranks, peer))
        assert results == pytest.approx(theirs, rel=2e-5), ranks
