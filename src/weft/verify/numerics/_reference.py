"""Facts from one process beyond a trial: the order of its forward, and the gradient of each part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.run.engine import create_training
from weft.run.worker._trial_data import TrialData
from weft.verify.numerics._differences import assemble
from weft.verify.numerics._keep_fp64 import KeepFp64
from weft.verify.numerics._trial import first_gradients, one_process


@dataclass(slots=True, kw_only=True)
class Contributions:
    """The first step's gradient in one process, taken apart."""

    order: tuple[str, ...]
    """Parameters as the forward first meets them."""
    of_data_rank: Sequence[dict[str, Tensor]]
    """Gradient of each data rank's samples alone; they add up to the whole."""
    totals: Sequence[Sequence[tuple[float, float]]]
    """Loss sum and count of each data rank's microbatches."""


def contributions(
    recipe: Recipe, plan: Plan, build: Callable[[], Blueprint], *, label_range: int | None = None
) -> Contributions:
    """Run the first step of the recipe in this process, one data rank's samples of `plan` after the other."""
    alone = one_process(plan)
    training = create_training(recipe, alone, build(), Mesh(alone.mesh, torch.device("cpu")), Recorder())
    module = training.model.parts[0].module
    order = _watch_order(module)
    parts: list[dict[str, Tensor]] = []
    totals: list[list[tuple[float, float]]] = []
    for rank in range(plan.mesh.data):
        data = TrialData(build(), plan, data_index=rank, seed=recipe.run.seed, label_range=label_range)
        parts.append({})
        totals.append([])
        for microbatch in data.microbatches(0):
            with KeepFp64():
                shards, total = first_gradients(training, recipe, [microbatch])
            totals[-1].append((float(total.sum), float(total.count)))
            gradients = {name.partition("/")[2]: tensor for name, tensor in assemble([shards]).items()}
            parts[-1] = {name: parts[-1].get(name, 0.0) + gradient for name, gradient in gradients.items()}
    return Contributions(order=tuple(order), of_data_rank=parts, totals=totals)


def _watch_order(module: nn.Module) -> list[str]:
    """Return a list that fills with the names of the parameters as a forward enters their modules."""
    order: list[str] = []
    first = {id(parameter): name for name, parameter in module.named_parameters()}

    def note(inner: nn.Module, args: Any) -> None:
        for parameter in inner.parameters(recurse=False):
            name = first[id(parameter)]
            if name not in order:
                order.append(name)

    for inner in module.modules():
        inner.register_forward_pre_hook(note)
    return order
