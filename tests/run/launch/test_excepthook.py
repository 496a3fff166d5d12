"""What is read where a script ends by an error: the reason and the user's line, under plain Python and torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MISTAKE = """
import weft

def main():
    weft.train("nowhere.toml")

main()
"""
BRANCH = """
import torch
import weft
from torch.utils.data import DataLoader, TensorDataset

with weft.session(quiet=True) as session:
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
    state = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=lambda out, batch: (out.sum(), len(out))
    )
    for batch in state.batches(2):
        state.step(batch)
        if session.rank == 1:
            state.evaluate(loader)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _said(folder: Path, script: str, *before: str) -> str:
    (folder / "script.py").write_text(script)
    command = [sys.executable, *before, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr


def test_plain_python_prints_a_paragraph_and_the_users_line(tmp_path: Path) -> None:
    said = _said(tmp_path, MISTAKE).splitlines()
    assert said[0] == "RecipeError: nowhere.toml does not exist."
    assert said[1].endswith("script.py, line 5, in main")
    assert said[2:] == ['    weft.train("nowhere.toml")']


def test_other_errors_are_printed_as_ever(tmp_path: Path) -> None:
    said = _said(tmp_path, MISTAKE.replace('train("nowhere.toml")', "train.nothing"))
    assert said.startswith("Traceback (most recent call last):")
    assert said.rstrip().endswith("AttributeError: 'function' object has no attribute 'nothing'")


def test_the_report_of_torchrun_ends_with_the_first_error(tmp_path: Path) -> None:
    said = _said(tmp_path, BRANCH, *TORCHRUN)
    cause = said[said.index("Root Cause") :]
    assert "rank 0 is in state.step() at script.py:13, rank 1 is in state.evaluate() at script.py:15" in cause
    assert "<N/A>" not in cause
    assert "site-packages/weft" not in said
    assert "src/weft" not in said
