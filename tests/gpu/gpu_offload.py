"""What waits with the host: peak memory of a device and time of a step, beside the same training with nothing away."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_parity import Verdict, memory_of

from weft.api import train
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.description import facts_of

SHAPE = {
    "num_layers": 12,
    "hidden_size": 1024,
    "num_heads": 8,
    "num_kv_heads": 8,
    "ffn_size": 2816,
    "vocabulary_size": 4096,
    "sequence_length": 256,
}
STEPS, RANKS = 6, 2
_STATE_BYTES = {"none": 0, "optimizer": 8, "parameters": 16}
"""Bytes per parameter that leave the device: moments; and shards and gradients in fp32."""
WAYS = (("none", "host"), ("optimizer", "host"), ("parameters", "host"), ("parameters", "disk"))


def offload_verdicts(
    device: str, kept: dict[str, Any], sizes: dict[str, int] | None = None, ways: tuple[tuple[str, str], ...] = WAYS
) -> Iterator[Verdict]:
    """Train a decoder under ZeRO-3 on two ranks of a device, with more and more of its states away.

    Losses must be those with nothing away, and the peak must fall by three quarters of what has left: states pass
    through buffers, and not all gradients are there at the peak.  `kept` takes the measurements.
    """
    shape = DecoderShape(**(sizes or SHAPE))
    recipe = Recipe(
        model=ModelRecipe(shape=shape),
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=2 * RANKS),
        optimizer=OptimizerRecipe(learning_rate=1e-4),
        run=RunRecipe(steps=STEPS),
        permit=PermitRecipe(precision=("bf16",)),
    )
    parameters = facts_of(recipe).num_parameters
    for what, where in ways:
        name = what if what == "none" else f"{what} to {where}"
        kept[name] = _measured(recipe, _plan(device, what, where))
        kept[name]["parameters"] = parameters
        if what == "none":
            continue
        apart = max(abs(a - b) / b for a, b in zip(kept[name]["losses"], kept["none"]["losses"], strict=True))
        yield Verdict(f"{name}: losses of {STEPS} steps in bf16, beside nothing away", apart, 1e-3)
        left = kept["none"]["peak_bytes"] - kept[name]["peak_bytes"]
        share = left / (parameters / RANKS * _STATE_BYTES[what])
        yield Verdict(f"{name}: what is still there of the {_STATE_BYTES[what]} bytes per weight", 1.0 - share, 0.25)


def _plan(device: str, what: str, where: str) -> Plan:
    return Plan(
        mesh=MeshPlan(shard=RANKS),
        data_parallel=DataParallelPlan(zero=3),
        microbatch=MicrobatchPlan(size=2),
        memory=memory_of(device, what, where),
        compute=ComputePlan(precision="bf16", device=device),  # type: ignore[arg-type]
    )


def _measured(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        result = train(recipe, plan, folder=Path(folder) / "run", quiet=True)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_seconds" in line]
    return {
        "losses": list(result.losses),
        "peak_bytes": max(line["memory_bytes"] for line in steps),
        "step_seconds": statistics.median(line["step_seconds"] for line in steps[2:]),
    }
