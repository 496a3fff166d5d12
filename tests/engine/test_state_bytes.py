"""Model-state bytes per rank under ZeRO 0 to 3 against the formulas of Rajbhandari et al. (arXiv 1910.02054, §5).

With fp32 weights, gradients and two AdamW moments take 4 bytes each, and the master is the weight: 16 bytes per
parameter.
Under bf16 the weight takes 2 and an fp32 master 4 more; ZeRO-3 holds no copy in bf16 between steps.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from engine_kit import Training, plan_of, recipe_of
from torch import nn

from weft.plan import Plan
from weft.recipe import OptimizerRecipe

N = 4
ADAMW = OptimizerRecipe()


def expected_bytes(zero: int, precision: str, reduce: str) -> float:
    """Bytes per parameter on one of N ranks."""
    weight = 2 if precision == "bf16" else 4
    gradient = 2 if reduce == "compute" and precision == "bf16" else 4
    master = 4 if precision == "bf16" else 0
    moments = 8
    match zero:
        case 0:
            return weight + gradient + master + moments
        case 1:
            return weight + gradient + (master + moments) / N
        case 2:
            return weight + (gradient + master + moments) / N
        case _:
            return (4 + 4 + moments) / N


def measure(plans: dict[str, Plan], precision: str) -> dict[str, tuple[int, int, int]]:
    """(bytes said, bytes of the tensors alive, parameters) of each plan on this rank, after two steps."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, plan in plans.items():
        gc.collect()
        before = set(_alive())
        training = Training(recipe_of(precision, ADAMW, hidden_size=64, ffn_size=128), plan)
        parameters = sum(p.numel() for p in training.state.model.blueprint.module.parameters())
        for step in range(2):
            training.step(step)
        training.state.model.stores.release()
        gc.collect()
        alive = sum(size for place, size in _alive().items() if place not in before)
        found[name] = sum(training.finished().bytes.values()), alive, parameters
        del training
    return found


def _alive() -> dict[int, int]:
    """Address → bytes of the storages of all tensors that exist."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # torch's own placeholders without storage
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize(("precision", "reduce"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "compute")])
def test_bytes_per_rank_follow_the_formulas(ranks: Any, precision: str, reduce: str) -> None:
    plans = {
        f"zero{zero}": plan_of(
            precision,
            zero=zero,
            shard=N if zero == 3 else 1,
            replicate=1 if zero == 3 else N,
            reduce_precision=reduce,
            bucket_bytes=1 << 20,
        )
        for zero in range(4)
    }
    for one in ranks.run(N, measure, plans, precision):
        for zero in range(4):
            said, alive, parameters = one[f"zero{zero}"]
            wanted = expected_bytes(zero, precision, reduce) * parameters
            assert said == pytest.approx(wanted, rel=0.05), f"ZeRO-{zero}"
            assert alive == pytest.approx(wanted, rel=0.05), f"ZeRO-{zero}: what is really held"
