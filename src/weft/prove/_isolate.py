"""Take one technique after another out of a plan, to find those that a difference needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.plan import Plan
from weft.recipe import ConvNetShape, ModelRecipe, Recipe


def _without_recompute(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, recompute="none"))


def _without_fused_loss(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, fused_loss=False))


def _without_accumulation(plan: Plan) -> Plan:
    """The same samples on the same data ranks, in one microbatch each."""
    shares = plan.microbatch.shares(plan.mesh.data)
    if len(set(shares)) > 1:
        return plan
    return replace(plan, microbatch=replace(plan.microbatch, size=plan.microbatch.size * shares[0], per_step=1))


def _with_plain_schedule(plan: Plan) -> Plan:
    pipeline = replace(plan.pipeline_parallel, schedule="1f1b", chunks_per_rank=1, cuts=None)
    return plan if plan.mesh.pipeline == 1 else replace(plan, pipeline_parallel=pipeline)


def _without_zero(plan: Plan) -> Plan:
    if plan.mesh.data == 1:
        return plan
    mesh = replace(plan.mesh, replicate=plan.mesh.data, shard=1)
    return replace(plan, mesh=mesh, data_parallel=replace(plan.data_parallel, zero=0))


def _without_pipeline(plan: Plan) -> Plan:
    pipeline = replace(plan.pipeline_parallel, schedule="1f1b", chunks_per_rank=1, cuts=None)
    return replace(plan, mesh=replace(plan.mesh, pipeline=1), pipeline_parallel=pipeline)


def _without_data(plan: Plan) -> Plan:
    """One data rank with everybody's microbatches."""
    return replace(
        plan,
        mesh=replace(plan.mesh, replicate=1, shard=1, expert=1),
        data_parallel=replace(plan.data_parallel, zero=0),
        microbatch=replace(plan.microbatch, per_step=sum(plan.microbatch.shares(plan.mesh.data))),
    )


def _without_sequence(plan: Plan) -> Plan:
    return replace(plan, tensor_parallel=replace(plan.tensor_parallel, sequence=False))


def _without_tensor(plan: Plan) -> Plan:
    return _without_sequence(replace(plan, mesh=replace(plan.mesh, tensor=1)))


_REMOVALS: Mapping[str, Callable[[Plan], Plan]] = {
    "the pipeline": _without_pipeline,
    "data ranks": _without_data,
    "tensor ranks": _without_tensor,
    "sequence parallelism": _without_sequence,
    "the pipeline's schedule": _with_plain_schedule,
    "ZeRO": _without_zero,
    "recomputation": _without_recompute,
    "the fused loss": _without_fused_loss,
    "accumulation": _without_accumulation,
}
"""Whole axes first: what is tried after them runs on fewer processes."""
TECHNIQUES = (*_REMOVALS, "dropout")


def without(technique: str, recipe: Recipe, plan: Plan, folder: Path) -> tuple[Recipe, Plan] | None:
    """Return recipe and plan without one of `TECHNIQUES`; None when they do not have it.

    The global batch stays.  A Hugging Face configuration without dropout is written into `folder`.
    """
    if technique == "dropout":
        model = _without_dropout(recipe.model, folder)
        return None if model is None else (replace(recipe, model=model), plan)
    simpler = _REMOVALS[technique](plan)
    return None if simpler == plan else (recipe, simpler)


def _without_dropout(model: ModelRecipe, folder: Path) -> ModelRecipe | None:
    shape = model.shape
    if shape is not None:
        if isinstance(shape, ConvNetShape) or shape.dropout == 0.0:
            return None
        return replace(model, shape=replace(shape, dropout=0.0))
    if model.hf is None:
        return None
    config: dict[str, Any] = json.loads(Path(model.hf).read_text(encoding="utf-8"))
    names = [name for name, value in config.items() if ("dropout" in name or name.endswith("pdrop")) and value]
    if not names:
        return None
    path = folder / "without-dropout.json"
    path.write_text(json.dumps(config | dict.fromkeys(names, 0.0)))
    return replace(model, hf=str(path))
