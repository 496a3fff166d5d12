"""Weft as a contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._llama import POOL, SEED, pool_of, samples_of, shape_of, world_size
from weft.comm.device import backend_for
from weft.comm.mesh import Mesh
from weft.comm.shared_memory import register_shared_memory_backend
from weft.comm.telemetry import Recorder
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    Plan,
    Recompute,
    parse_plan,
)
from weft.config.recipe import BatchRecipe, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.reference.decoder import build_decoder
from weft.run.data import rank_range
from weft.run.engine import TrainingState, create_training

LEARNING_RATE = 3e-4


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """`settings`: a whole plan as TOML, or precision, compile, zero, fused_loss, recompute, bucket_bytes,
    reduce_precision, batch, backend, threads."""
    if "plan" in settings:
        return parse_plan(settings["plan"])
    data = DataParallelPlan(zero=settings.get("zero", 1), reduce_precision=settings.get("reduce_precision", "fp32"))
    for name in ("bucket_bytes", "first_bucket_bytes"):
        if name in settings:
            data = replace(data, **{name: settings[name]})
    return Plan(
        mesh=MeshPlan(shard=world_size()),
        data_parallel=data,
        microbatch=MicrobatchPlan(size=settings.get("batch", 8), per_step=1),
        memory=MemoryPlan(fused_loss=settings.get("fused_loss", True), recompute=_recompute(settings)),
        compute=ComputePlan(
            precision=settings.get("precision", "fp32"),
            compile=settings.get("compile", False),
            threads_per_rank=settings.get("threads", 1),
            device="cpu",
            backend=settings.get("backend", "auto"),
        ),
    )


def _recompute(settings: Mapping[str, Any]) -> Recompute | tuple[Recompute, ...]:
    words = settings.get("recompute", "none")
    return words if isinstance(words, str) else tuple(words)  # pyright: ignore[reportReturnType]  the plan checks them


def recipe_of(settings: Mapping[str, Any], plan: Plan) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape_of(settings)),
        batch=BatchRecipe(global_batch_size=plan.global_batch_size),
        optimizer=OptimizerRecipe(
            learning_rate=LEARNING_RATE, betas=(0.9, 0.95), max_grad_norm=settings.get("max_grad_norm")
        ),
        run=RunRecipe(steps=1, seed=SEED),
        permit=PermitRecipe(precision=(plan.compute.precision,)),
    )


def create(settings: Mapping[str, Any]) -> TrainingState:
    """Join the process group and build this rank's training."""
    plan = plan_of(settings)
    if world_size() > 1:
        backend = backend_for(torch.device("cpu"), wanted=plan.compute.backend)
        if "weft" in backend:
            register_shared_memory_backend()
        dist.init_process_group(backend)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    return create_training(recipe_of(settings, plan), plan, build_decoder(shape_of(settings)), mesh, Recorder())


def weft(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A step of Weft's engine."""
    training, plan = create(settings), plan_of(settings)
    if "plan" in settings:
        torch.set_num_threads(plan.compute.threads_per_rank)
        pool = shared_pool(settings, plan, training.model.mesh.index("data"))
    else:
        pool = [[batch] for batch in pool_of(settings)]

    def step(index: int) -> float:
        return training.stepper(pool[index % len(pool)], step=index, learning_rate=LEARNING_RATE).loss

    return step


def shared_pool(settings: Mapping[str, Any], plan: Plan, data_index: int) -> list[list[dict[str, Tensor]]]:
    """A data rank's microbatches of every step, whatever the plan."""
    start, stop = rank_range(plan.microbatch, plan.mesh.data, data_index)
    whole, size = plan.global_batch_size, plan.microbatch.size
    found: list[list[dict[str, Tensor]]] = []
    for step in range(POOL):
        batch = samples_of(settings, range(step * whole, (step + 1) * whole))
        found.append(
            [
                {name: value[at : min(at + size, stop)] for name, value in batch.items()}
                for at in range(start, stop, size)
            ]
        )
    return found


def recipe_for_auto(batch: int) -> Recipe:
    """The benchmark's training as a user would write it, where bf16 is permitted and the run is long."""
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape_of({})),
        batch=BatchRecipe(global_batch_size=batch),
        optimizer=OptimizerRecipe(learning_rate=LEARNING_RATE, betas=(0.9, 0.95), max_grad_norm=None),
        run=RunRecipe(steps=100_000, seed=SEED),
        permit=PermitRecipe(precision=("fp32", "bf16")),
    )
