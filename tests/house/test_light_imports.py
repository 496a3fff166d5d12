"""Starting is fast, because little is imported: `python -m benchmarks starting` says how fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WEFT = Path(sys.executable).with_name("weft")

NO_TORCH = ["cli", "config.recipe", "config.cluster", "config.plan", "config.document", "comm.algorithms", "errors"]
NO_TORCH += ["run.launch", "planning.search", "planning.explain", "planning.price", "interop.systems"]
NO_TORCH += ["model.description", "model.profile", "verify.program"]

NOUNS = """
import weft.config.recipe, weft.config.cluster, weft.config.plan
import weft.model.description
import weft.techniques.check
recipe = weft.config.recipe.parse_recipe('''[model]
reference = "decoder"
num_layers = 2
hidden_size = 64
num_heads = 4
[batch]
global_batch_size = 8
[run]
steps = 1
''')
plan = weft.config.plan.Plan(microbatch=weft.config.plan.MicrobatchPlan(size=8))
weft.techniques.check.check_plan(plan, recipe, weft.model.description.facts_of(recipe))
weft.config.plan.dump_plan(plan, {"mesh.replicate": f"{weft.config.cluster.Cluster.detect().num_cores} cores"})
"""


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", NO_TORCH)
def test_imports_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import weft.{module}")


def test_the_nouns_are_light() -> None:
    assert not {"torch", "numpy", "transformers", "rich", "cyclopts"} & modules_after(NOUNS)


def test_import_weft_adds_next_to_nothing_to_torch() -> None:
    before = "import torch, torch.distributed"
    added = modules_after(f"{before}, weft") - modules_after(before)
    assert "weft" in added
    assert len(added) <= 10


def test_help_imports_the_command_line_only() -> None:
    command = [sys.executable, "-X", "importtime", str(WEFT), "--help"]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Usage" in told.stdout
    names = [line.split("|")[-1].strip() for line in told.stderr.splitlines() if "|" in line]
    assert "weft.cli" in names
    assert not {"torch", "numpy", "transformers"} & set(names)
    assert sum(name.startswith("weft") for name in names) < 80
