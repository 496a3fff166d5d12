"""A rank of a training is handed a finished plan: it loads no planner, and of Weft no more than is held here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WEFT = str(Path(sys.executable).with_name("weft"))
MOST_LINES = 23_600
"""Source lines of Weft that a rank loads.  Lower it when less is loaded, never raise it."""
PLANNER = {"cli", "describe", "eject", "entry", "explain", "price", "search", "systems"}

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


@pytest.mark.parametrize("plan", ["plan.toml", "auto"])
def test_a_rank_loads_no_planner(plan: str, tmp_path: Path) -> None:
    for name, text in {"telling.py": TELLING, "recipe.toml": RECIPE, "plan.toml": FIXED}.items():
        (tmp_path / name).write_text(text)
    command = [WEFT, "train", "recipe.toml", "--processes", "2"]
    command += ["--plan", plan] if plan != "auto" else []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(tmp_path.glob("loaded-*.json"))
    assert len(told) >= 2, "every rank tells"
    for file in told:
        loaded: dict[str, str] = json.loads(file.read_text())
        rooms = {name.split(".")[1] for name in loaded if "." in name}
        assert not rooms & PLANNER
        lines = sum(len(Path(path).read_text().splitlines()) for path in loaded.values() if path.endswith(".py"))
        assert lines <= MOST_LINES, f"{lines:,} lines of {len(loaded)} modules"
