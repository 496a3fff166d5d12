"""Any mesh through the whole engine, without its techniques: what placements say is enough for the rest.

The model has experts that ranks share out (their gradients are summed over fewer ranks than the others'), each of which
the tensor axis cuts (so that a parameter is cut over two axes), and context ranks see other tokens of the same samples.
What a technique would do to such a model is done here by hand; stores, clipping, optimizers, losses and checkpoints are
the engine's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import ADAMW, BATCH, Samples, Seen, Training, agreed, plan_of, recipe_of
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import Axis, MeshPlan, Plan
from weft.config.recipe import OptimizerRecipe, Recipe
from weft.model.blueprint import Batch, Blueprint
from weft.run.checkpoint import Checkpointer, Peers
from weft.techniques import build
from weft.techniques.context.runtime import ContextRanks
from weft.techniques.core import ModelPart, Placement, Split
from weft.techniques.core.autograd import copy_to_group, gather_sequence, reduce_from_group, reduce_scatter_sequence
from weft.techniques.expert.runtime import ExpertRanks
from weft.techniques.runtime import TechniqueRuntime
from weft.techniques.tensor.runtime import TensorRanks
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

LENGTH, WIDTH, HIDDEN, EXPERTS = 6, 5, 8, 4
STEPS = 3
CLIP = 0.2
ALONE = GroupView((0,), 0, None)
OPTIMIZERS = {
    "adamw": replace(ADAMW, max_grad_norm=CLIP),
    "lamb": OptimizerRecipe(name="lamb", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=CLIP),
    "adafactor": OptimizerRecipe(name="adafactor", learning_rate=1e-2, weight_decay=0.1, max_grad_norm=CLIP),
}
MESHES = {
    "context": MeshPlan(replicate=2, context=2),
    "context outside": MeshPlan(
        shard=2, context=2, order=("context", "pipeline", "replicate", "shard", "expert", "tensor")
    ),
    "experts": MeshPlan(replicate=2, shard=2, expert=2),
    "experts of context ranks": MeshPlan(shard=2, context=2, expert=4),
    "experts and tensor": MeshPlan(shard=2, tensor=2, expert=2),
}


class Experts(nn.Module):
    """Token by token one of some two-layer networks, whose weights stand in one tensor per layer; a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3, requires_grad=False)
        self.sharing, self.cutting = ALONE, ALONE

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        """Every rank computes, for the tokens of all that share experts out, what its own experts make of them."""
        if self.sharing.group is not None:
            length = x.shape[1] * self.sharing.size
            x = gather_sequence(x, self.sharing, length, sum_grad=True)
            route = gather_sequence(route, self.sharing, length, sum_grad=True)
        here = copy_to_group(x, self.cutting) if self.cutting.group is not None else x
        made = torch.zeros_like(x)
        for local in range(self.up.shape[0]):
            out = torch.tanh((here + self.bias[local]) @ self.up[local]) @ self.down[local]
            chosen = route == self.sharing.index * self.up.shape[0] + local
            made = made + out * chosen[..., None]
        if self.cutting.group is not None:
            made = reduce_from_group(made, self.cutting)
        return made if self.sharing.group is None else reduce_scatter_sequence(made, self.sharing)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.experts = Experts()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.frozen.requires_grad_(False)

    def forward(self, features: Tensor, route: Tensor) -> Tensor:
        x = torch.tanh(self.first(features))
        return self.last(self.frozen(x + self.experts(x, route))).sum(-1)


def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squares of the tokens that count, and how many do."""
    return ((outputs - batch["labels"]).square() * batch["weights"]).sum(), batch["weights"].sum()


def blueprint() -> Blueprint:
    torch.manual_seed(4)
    inputs = {"features": "features", "route": "route"}
    return Blueprint(module=Net().double(), inputs=inputs, loss=loss, initialise=None, sequence_length=LENGTH)


def sample(index: int) -> dict[str, Tensor]:
    """The second half of a sequence holds fewer tokens that count."""
    generator = torch.Generator().manual_seed(index)
    weights = torch.rand(1, LENGTH, generator=generator, dtype=torch.float64) < torch.linspace(1.0, 0.3, LENGTH)
    return {
        "features": torch.randn(1, LENGTH, 3, generator=generator, dtype=torch.float64),
        "route": torch.randint(0, EXPERTS, (1, LENGTH), generator=generator),
        "labels": torch.randn(1, LENGTH, generator=generator, dtype=torch.float64),
        "weights": weights.double(),
    }


class Parts(Samples):
    """A context rank's part of every sequence."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        super().__init__(sample, plan, mesh)
        size = LENGTH // plan.mesh.context
        self._own = slice(mesh.index("context") * size, (mesh.index("context") + 1) * size)

    def microbatches(self, step: int) -> list[Batch]:
        batches = super().microbatches(step)
        return [{n: t if n == "sample_ids" else t[:, self._own] for n, t in batch.items()} for batch in batches]


class ShareOut(TechniqueRuntime):
    """Shares experts out, and cuts each of them over the tensor axis."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def split(self, part: ModelPart) -> None:
        experts = part.module.experts
        assert isinstance(experts, Experts)
        sharing, cutting = experts.sharing, experts.cutting = self._mesh["expert"], self._mesh["tensor"]
        for name, dim in (("up", 2), ("down", 1), ("bias", None)):
            placements: dict[Axis, Placement] = {}
            if sharing.size > 1:
                placements["expert"] = Split(dim=0, parts=sharing.size, index=sharing.index)
            if cutting.size > 1 and dim is not None:
                placements["tensor"] = Split(dim=dim, parts=cutting.size, index=cutting.index)
            entry = replace(part.layout[f"experts.{name}"], placements=placements)
            part.layout.entries[f"experts.{name}"] = entry
            old = getattr(experts, name)
            new = nn.Parameter(entry.split.slice(old.detach()), requires_grad=old.requires_grad)
            setattr(experts, name, new)


class Placed(Training):
    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        theirs = build.techniques_of
        build.techniques_of = lambda known: [
            *(each for each in theirs(known) if not isinstance(each, TensorRanks | ContextRanks | ExpertRanks)),
            ShareOut(known.mesh),
        ]
        try:
            super().__init__(recipe, plan, blueprint, sample)
        finally:
            build.techniques_of = theirs
        self.data = Parts(plan, self.mesh)


def train(recipe: Recipe, plans: dict[str, Plan]) -> dict[str, Seen]:
    results: dict[str, Seen] = {}
    for name, plan in plans.items():
        training = Placed(recipe, plan)
        for step in range(STEPS):
            training.step(step)
        results[name] = training.finished()
        training.state.close()
    return results


def plans_of(mesh: MeshPlan, stages: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Plan]:
    """Two microbatches of two samples on a data rank, in several buckets."""
    micro = BATCH // 2 // mesh.data
    return {f"zero {z}": replace(plan_of(zero=z, micro=micro, shares=(2,) * mesh.data, bucket_bytes=1024), mesh=mesh)
            for z in stages}  # fmt: skip


def judge(expected: Seen, actual: list[Seen], name: str) -> None:
    seen = agreed(actual)
    for ours, theirs in zip(seen.norms + seen.losses, expected.norms + expected.losses, strict=True):
        assert abs(ours - theirs) <= TOLERANCES["fp64"] * abs(theirs), name
    worst = compare(assemble([expected.state]), assemble([one.state for one in actual]))[0]
    assert worst.relative < TOLERANCES["fp64"], f"{name}: {worst}"
    counted: dict[str, int] = {}
    for stored in (stored for one in actual for stored in one.state if stored.counts):
        counted[stored.name] = counted.get(stored.name, 0) + stored.tensor.numel()
    assert counted == {stored.name: stored.shape.numel() for stored in expected.state}, (
        f"{name}: every element counts once"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_trains_as_one_process(ranks: Any, mesh: str, optimizer: str) -> None:
    plans = plans_of(MESHES[mesh], (0, 1, 2, 3) if optimizer != "adafactor" else (1, 3))
    recipe = recipe_of(optimizer=OPTIMIZERS[optimizer])
    (expected,) = ranks.run(1, train, recipe, {"alone": one_process(plans["zero 1"])})
    assert min(expected["alone"].norms) > CLIP, "every step is clipped"
    actual = ranks.run(4, train, recipe, plans)
    for name in plans:
        judge(expected["alone"], [one[name] for one in actual], name)


def carry_on(recipe: Recipe, plan: Plan, folder: Path, first: int) -> Seen:
    """One step from what is saved in the folder, and a save."""
    training = Placed(recipe, plan)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.checkpoint_shards()))
    training.step(first)
    keeper.save(first + 1, training.state.checkpoint_shards(), training.state.state())
    training.state.close()
    return training.finished()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_goes_from_mesh_to_mesh(ranks: Any, tmp_path: Path, optimizer: str) -> None:
    """Two axes, then experts, then context ranks, then one process: the curve and state of one process."""
    recipe = recipe_of(optimizer=OPTIMIZERS[optimizer])
    legs = [("experts and tensor", 2), ("experts of context ranks", 3), ("experts and tensor", 3)]
    chain = [plans_of(MESHES[mesh], (zero,))[f"zero {zero}"] for mesh, zero in legs]
    alone = one_process(chain[0])
    losses: list[float] = []
    actual: list[Seen] = []
    for first, plan in enumerate([*chain[: STEPS - 1], alone]):
        actual = ranks.run(plan.mesh.world_size, carry_on, recipe, plan, tmp_path, first)
        losses += agreed(actual).losses
    (expected,) = ranks.run(1, train, recipe, {"alone": alone})
    assert losses == pytest.approx(expected["alone"].losses, rel=1e-10)
    worst = compare(assemble([expected["alone"].state]), assemble([one.state for one in actual]))[0]
    assert worst.relative < TOLERANCES["fp64"], str(worst)
