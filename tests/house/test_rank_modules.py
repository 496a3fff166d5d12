"""A rank of a training is handed a finished plan: it loads no planner, and of Weft no more than is held here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import ROOT

WEFT = str(Path(sys.executable).with_name("weft"))
MOST_LINES = 16_900
"""Lines of code and imports of Weft that a rank loads, without comments, docstrings and blanks, which cost it nothing.
Lower it when less is loaded."""
PROOF_LINES = 1_300
"""Lines beside them of the proof at the start, where it was not kept from an earlier one."""
ENGINE_LINES = 1_350
"""Lines of them that a rank over Gloo does not load."""
PLANNER = {"cli", "api", "interop", "planning"}

TELLING = """
import json, os, sys
from pathlib import Path

import torch.distributed as dist
from torch import nn


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        if self.training and dist.is_initialized():
            loaded = {name: module.__file__ for name, module in list(sys.modules.items())
                      if name.partition(".")[0] == "weft" and module.__file__}
            Path(__file__).with_name(f"loaded-{os.getpid()}.json").write_text(json.dumps(loaded))
        return self.head(self.embedding(tokens))
"""
RECIPE = """
[model]
factory = "telling:Telling"
sequence_length = 8
[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0
[batch]
global_batch_size = 4
[run]
steps = 3
"""
FIXED = "[mesh]\nreplicate = 2\n[microbatch]\nsize = 2\n"


GLOO = f'{FIXED}[compute]\nbackend = "gloo"\n'
NEVER_BY_GLOO = {"engine", "forming", "group", "_handshake", "_mailbox", "_work"}
"""Modules of `weft.comm.shared_memory` that only groups over shared memory need."""


@pytest.fixture(scope="module")
def num_lines() -> Iterator[Callable[[str], int]]:
    sys.path.insert(0, str(ROOT / "docs"))
    from count_lines import count

    def lines(path: str) -> int:
        kinds = count(Path(path).read_text(encoding="utf-8"))
        return kinds["code"] + kinds["import"]

    yield lines
    sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize(
    ("plan", "prove"), [("plan.toml", "never"), ("plan.toml", "always"), ("gloo.toml", "never"), ("auto", "never")]
)
def test_a_rank_loads_no_planner(plan: str, prove: str, tmp_path: Path, num_lines: Callable[[str], int]) -> None:
    texts = {"telling.py": TELLING, "recipe.toml": RECIPE, "plan.toml": FIXED, "gloo.toml": GLOO}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    command = [WEFT, "train", "recipe.toml", "--processes", "2", "--prove", prove]
    command += ["--plan", plan] if plan != "auto" else []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(tmp_path.glob("loaded-*.json"))
    assert len(told) >= 2, "every rank tells"
    for file in told:
        loaded: dict[str, str] = json.loads(file.read_text())
        wings = {name.split(".")[1] for name in loaded if "." in name}
        assert not wings & PLANNER
        if plan == "gloo.toml":
            assert not {f"weft.comm.shared_memory.{name}" for name in NEVER_BY_GLOO} & loaded.keys()
        lines = sum(map(num_lines, (path for path in loaded.values() if path.endswith(".py"))))
        most = MOST_LINES - (ENGINE_LINES if plan == "gloo.toml" else 0)
        most += PROOF_LINES if prove == "always" else 0
        assert lines <= most, f"{lines:,} lines of {len(loaded)} modules"
