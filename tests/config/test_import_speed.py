"""The nouns are quick to import and never bring torch."""

from __future__ import annotations

import subprocess
import sys

import pace

CODE = """
import sys, time
started = time.process_time()
import weft.config.recipe, weft.config.cluster, weft.config.plan
seconds = time.process_time() - started
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
heavy = {"torch", "numpy", "transformers", "rich", "cyclopts"} & set(sys.modules)
print(seconds, ",".join(sorted(heavy)) or "none")
"""


LIMIT_SECONDS = 0.2
"""Twice of what a quiet machine takes: in company each import waits longer for the caches than numpy does."""


def test_the_nouns_are_light() -> None:
    assert pace.reference_seconds(_measure, LIMIT_SECONDS, pace=pace.import_slowness) < LIMIT_SECONDS


def _measure() -> float:
    """Seconds of processor time, which other work on the machine does not stretch much."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.split()
    assert heavy == "none"
    return float(seconds)
