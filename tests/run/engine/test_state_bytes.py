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
from torch.distributed.fsdp import FSDPModule

from weft.config.plan import Plan
from weft.config.recipe import OptimizerRecipe
from weft.model.description import profile_of
from weft.planning.price import Memories
from weft.techniques.cost_terms import Layout

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
    results: dict[str, tuple[int, int, int]] = {}
    for name, plan in plans.items():
        gc.collect()
        before = _alive()
        training = Training(recipe_of(precision, ADAMW, hidden_size=64, ffn_size=128), plan)
        parameters = sum(p.numel() for p in training.state.model.blueprint.module.parameters())
        for step in range(2):
            training.step(step)
        training.state.model.stores.release()
        gc.collect()
        alive = sum(storage.nbytes() for address, storage in _alive().items() if address not in before)
        results[name] = sum(training.finished().bytes.values()), alive, parameters
        del training, before
    return results


def _alive() -> dict[int, torch.UntypedStorage]:
    """Address → storage, of all tensors that exist.

    The storages are returned themselves: memory that earlier tests free in between would be given out again, at
    addresses that look as if they had been there before.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # torch's own placeholders without storage
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage()
    return storages


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
            expected = expected_bytes(zero, precision, reduce) * parameters
            assert said == pytest.approx(expected, rel=0.05), f"ZeRO-{zero}"
            assert alive == pytest.approx(expected, rel=0.05), f"ZeRO-{zero}: what is really held"


def held_between(plans: dict[str, Plan], precision: str) -> dict[str, int]:
    """By plan, bytes of the gradients that this rank holds when a step's second microbatch begins."""
    results: dict[str, int] = {}
    for name, plan in plans.items():
        training = Training(recipe_of(precision, ADAMW, hidden_size=64, ffn_size=128), plan)
        training.step(0)
        sizes: list[int] = []
        module = training.state.model.module
        handle = module.register_forward_pre_hook(lambda inside, _, sizes=sizes: sizes.append(_gradient_bytes(inside)))
        training.step(1)
        handle.remove()
        assert sizes[0] == 0
        results[name] = sizes[1]
        training.finished()
    return results


def _gradient_bytes(module: nn.Module) -> int:
    """Of `fully_shard`'s parameters: whole gradients, in one dtype or the other, and shards."""
    total = 0
    for unit in module.modules():
        groups = unit._get_fsdp_state()._fsdp_param_groups if isinstance(unit, FSDPModule) else ()
        for sharded in (each for group in groups for each in group.fsdp_params):
            whole = [sharded.unsharded_accumulated_grad, sharded.unsharded_param.grad]
            kept = sharded.sharded_param.grad
            for gradient in [*whole, None if kept is None else kept.to_local()]:
                total += 0 if gradient is None else gradient.numel() * gradient.element_size()
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_between_microbatches_are_what_was_priced(ranks: Any, precision: str) -> None:
    """ZeRO-3 keeps whole gradients only where they are reduced once per step, with copies or without."""
    plans = {
        f"{every}-{replicate}": plan_of(
            precision, zero=3, shard=N // replicate, replicate=replicate, micro=1, every=every
        )
        for every in ("auto", "step", "microbatch")
        for replicate in (1, 2)
    }
    recipe = recipe_of(precision, ADAMW, hidden_size=64, ffn_size=128)
    profile = profile_of(recipe)
    assert profile is not None
    memories = Memories(profile, on_accelerator=False)
    for one in ranks.run(N, held_between, plans, precision):
        for name, plan in plans.items():
            (stage,) = memories.of(Layout.of(plan))
            # With copies, what is summed over shards waits for the copies outside of the parameters.
            expected = 0 if name == "auto-2" or name == "microbatch-2" else stage.kinds.gradients
            assert one[name] == pytest.approx(expected, rel=0.05), name
