"""How often compiled blocks ran as compiled code: `python tests/parity/compiled_blocks.py CELL …`.

Torch runs eagerly what it cannot compile, or has compiled too often, and says nothing.  Prints a line of JSON per cell.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

import matrix  # noqa: E402 - the path of the pool comes first
import torch  # noqa: E402
from parity_run import Matrix, with_precision, without_traces_of_compiling  # noqa: E402
from pool import RankPool  # noqa: E402

from weft.config.plan import Plan  # noqa: E402
from weft.config.recipe import Recipe  # noqa: E402
from weft.model.build import build_model  # noqa: E402
from weft.verify.numerics import run_trial  # noqa: E402

STEPS = 3


def count_runs(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Train beside a thread that is not Weft's.  Returns how many graphs there are, where they end, and how often
    blocks ran forwards and backwards as compiled code."""
    from torch._dynamo.utils import counters

    counters.clear()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    done = threading.Event()
    other = threading.Thread(target=done.wait, name="the user's")
    other.start()
    try:
        with without_traces_of_compiling(), profile:
            run_trial(recipe, plan, lambda: build_model(recipe), steps=STEPS)
    finally:
        done.set()
        other.join()
    runs = Counter(event.name for event in profile.events())
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": [*counters["graph_break"]],
        "forwards": sum(times for name, times in runs.items() if name.startswith("Torch-Compiled Region")),
        "backwards": runs["CompiledFunctionBackward"],
    }


def main(names: list[str]) -> None:
    known = {str(cell): cell for cell in matrix.FULL}
    ranks = RankPool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            parity = Matrix.create(ranks, Path(folder))
            for name in names:
                cell = known[name]
                plan, recipe = with_precision(cell.plan, "fp64"), parity.recipe(cell.model, "fp64")
                found = ranks.run(plan.mesh.world_size, count_runs, recipe, plan, timeout=440.0)
                shares = plan.microbatch.shares(plan.mesh.data)
                print(json.dumps({"cell": name, "microbatches": shares, "ranks": found}))
    finally:
        ranks.close()


if __name__ == "__main__":
    import compiled_blocks

    compiled_blocks.main(sys.argv[1:])
