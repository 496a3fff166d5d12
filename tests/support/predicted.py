"""The predicted program of every rank of a cell against what the rank was recorded to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.config.plan import Plan, axis_coordinates
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.losses import count_labels
from weft.techniques.context.token_runs import runs_of
from weft.techniques.send_trace import Outline, Phase
from weft.techniques.tensor.mesh_2d.shape import grid_of_plan
from weft.verify.numerics import Trial, TrialData
from weft.verify.program import differences, occasions_of, program_of


def unlike_predicted(
    recipe: Recipe, plan: Plan, blueprint: Blueprint, outline: Outline, trials: Sequence[Trial]
) -> list[str]:
    """What some rank sent otherwise than predicted, in words: in the gradients of the first step, or in a step."""
    found: list[str] = []
    for rank, trial in enumerate(trials):
        labels = _labels(recipe, plan, blueprint, rank, len(trial.losses))
        for number, seen in enumerate(trial.launched):
            step = max(number - 1, 0)
            is_widened = plan.compute.precision == "fp64"  # trials let nothing be narrower
            program = program_of(recipe, plan, outline, rank, labels=labels[step], is_widened=is_widened)
            is_first = number == 0  # the first pass of a training, which ends before ranks agree on anything
            phases: tuple[Phase, ...] = ("gradients",) if is_first else ("gradients", "agreement", "update")
            unused = not is_first and trial.unused[step]
            occasions = occasions_of(recipe, plan, step, is_first=is_first, some_unused=unused)
            rows = {(what, exchange): many for what, exchange, many in trial.rows[number]}
            predicted = program.traffic(*occasions, phases=phases, rows=rows)
            where = "the first gradients" if is_first else f"step {step}"
            found += [f"rank {rank}, {where}: {line}" for line in differences(predicted, seen)]
    return found


def _labels(recipe: Recipe, plan: Plan, blueprint: Blueprint, rank: int, steps: int) -> list[list[int]]:
    """Labels that count, by step and microbatch."""
    place = axis_coordinates(plan.mesh, rank)
    index = place["replicate"] * plan.mesh.shard + place["shard"]
    data = TrialData(blueprint, plan, data_index=index, seed=recipe.run.seed)
    ranks, shape = plan.mesh.context, grid_of_plan(plan)

    def held(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Labels of the rank's own tokens."""
        if shape is not None:
            return {"labels": batch["labels"].tensor_split(shape.sample_parts)[shape.loss_part(place["tensor"])]}
        if ranks == 1:
            return dict(batch)
        runs = runs_of(batch["labels"].shape[1], ranks, place["context"])
        return {"labels": torch.cat([batch["labels"][:, start:stop] for start, stop in runs], 1)}

    return [[count_labels(held(batch)) for batch in data.microbatches(step)] for step in range(max(steps, 1))]
