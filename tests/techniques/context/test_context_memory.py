"""What a rank keeps from the forward to the backward falls as its share of the tokens does, under every scheme."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import ContextParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DataRecipe, DataSource, DecoderShape, ModelRecipe, Recipe, RunRecipe
from weft.model.blueprint import Batch
from weft.model.build import build_model
from weft.run.engine import create_training
from weft.verify.numerics import TrialData

RECIPE = Recipe(
    model=ModelRecipe(
        reference="decoder",
        shape=DecoderShape(
            num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, vocabulary_size=64, sequence_length=256
        ),
    ),
    data=DataRecipe(train=(DataSource(source="synthetic"),)),
    batch=BatchRecipe(global_batch_size=2),
    run=RunRecipe(steps=1),
)


def kept_bytes(plan: Plan) -> int:
    """Bytes of all that one microbatch keeps for its backward, each storage once, weights left out."""
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor, weights: set[int]) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)

    _run_forward(plan, keep)
    return sum(seen.values())


def living_bytes(plan: Plan) -> int:
    """Bytes by which all tensors that there are at once become more in a microbatch's forward: also those that a
    recomputed block keeps beside the graph."""
    before: dict[int, int] = {}
    most = 0

    def look(tensor: Tensor, weights: set[int]) -> None:
        nonlocal most
        most = max(most, sum(size for where, size in _living().items() if where not in before))

    _run_forward(plan, look, lambda: before.update(_living()))
    return most


def _living() -> dict[int, int]:
    """Where memory of tensors lies, and how many bytes."""
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.device.type == "cpu"]
    storages = [one.untyped_storage() for one in tensors if not isinstance(one, DTensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _run_forward(
    plan: Plan, saved: Callable[[Tensor, set[int]], None], start: Callable[[], None] = lambda: None
) -> None:
    """One microbatch; tell `saved` every tensor that the graph keeps, and where weights lie."""
    blueprint, mesh = build_model(RECIPE), Mesh(plan.mesh, torch.device("cpu"))
    training = create_training(RECIPE, plan, blueprint, mesh, Recorder())
    batches: list[Batch] = TrialData(blueprint, plan, data_index=mesh.data_index, seed=1).microbatches(0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in training.model.module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        saved(tensor, weights)
        return tensor

    stores: Any = training.model.stores
    stores.begin_step()
    start()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        training.model.runner.forward_backward(batches, step=0, seed=1, scale=1.0, observer=stores)
    stores.finish()
    training.close()


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses", "usp"])
def test_what_is_kept_is_shared_out(ranks: RankPool, scheme: str):
    microbatch = MicrobatchPlan(size=2)
    (whole,) = ranks.run(1, kept_bytes, Plan(microbatch=microbatch))
    for number in (4,) if scheme == "usp" else (2, 4):
        plan = Plan(
            mesh=MeshPlan(context=number),
            context_parallel=ContextParallelPlan(scheme=scheme),  # type: ignore[arg-type]
            microbatch=microbatch,
        )
        for mine in ranks.run(number, kept_bytes, plan):
            assert mine * number == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
def test_selective_recomputation_keeps_nothing_of_each_source(ranks: RankPool, scheme: str):
    microbatch, memory = MicrobatchPlan(size=2), MemoryPlan(recompute="selective")
    (whole,) = ranks.run(1, living_bytes, Plan(microbatch=microbatch, memory=memory))
    plan = Plan(
        mesh=MeshPlan(context=4),
        context_parallel=ContextParallelPlan(scheme=scheme),  # type: ignore[arg-type]
        microbatch=microbatch,
        memory=memory,
    )
    for mine in ranks.run(4, living_bytes, plan):
        assert mine * 4 < whole * 1.05
