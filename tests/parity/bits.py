"""One step of a cell over Gloo and over shared memory, compared bit for bit on every rank.

At 2 ranks a sum has one order, a + b, whoever adds: both carriers must give the same bits in every precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from cells import Cell
from parity_run import Matrix, with_precision, without_traces_of_compiling
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.comm.shared_memory import shared_memory_group
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.core import CheckpointShard
from weft.verify.numerics import Trial, run_trial

AXES = ("world", "data", "shard", "replicate", "tensor", "pipeline")


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank saw of one step, and how many collectives took the shared memory."""

    trial: Trial
    num_shared: int


def run_step(recipe: Recipe, plan: Plan) -> Step:
    """Gradients of the first step, that step, and the loss of the next weights."""
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    with without_traces_of_compiling():
        trial = run_trial(recipe, plan, lambda: build_model(recipe), steps=1, mesh=mesh)
    shared = {shared_memory_group(mesh[axis].group) for axis in AXES}  # type: ignore[index]  # names of groups
    return Step(trial, sum(group.served.total() for group in shared if group is not None))


def run_both(ranks: RankPool, recipe: Recipe, plan: Plan) -> tuple[list[Step], list[Step]]:
    """The same step over Gloo and over shared memory, by rank."""
    check_plan(plan, recipe, facts_of(recipe), plan.mesh.world_size)
    check_runnable(plan)
    timeout = 480.0 if plan.compute.compile else 240.0  # of a hang; a busy machine takes its time
    gloo, shared = (
        ranks.run(plan.mesh.world_size, run_step, recipe, plan, timeout=timeout, backend=backend)
        for backend in ("gloo", "cpu:weft")
    )
    return gloo, shared


def differing(matrix: Matrix, cell: Cell, precision: str, plan: Plan | None = None) -> list[str]:
    """What is not the same over both, in words, after one step of a cell; `plan` instead of the cell's."""
    chosen = with_precision(cell.plan if plan is None else plan, precision)
    gloo, shared = run_both(matrix.ranks, matrix.recipe(cell.model, precision), chosen)
    wrong = ["Gloo carried what shared memory was to carry"] * any(step.num_shared == 0 for step in shared)
    wrong += ["shared memory carried what Gloo was to carry"] * any(step.num_shared for step in gloo)
    for rank, (one, other) in enumerate(zip(gloo, shared, strict=True)):
        wrong += [f"{what} on rank {rank}" for what in _unlike(one.trial, other.trial)]
    return wrong


def _unlike(one: Trial, other: Trial) -> Iterator[str]:
    yield from _unlike_shards(one.initial, other.initial, "first")
    yield from _unlike_shards(one.gradients, other.gradients, "")
    yield from _unlike_shards(one.state, other.state, "last")
    for name in ("losses", "gradient_norms", "validation"):
        wanted, found = getattr(one, name), getattr(other, name)
        if wanted != found:
            yield f"{name}: {found} instead of {wanted}"


def _unlike_shards(ones: Sequence[CheckpointShard], others: Sequence[CheckpointShard], when: str) -> Iterator[str]:
    assert [(stored.name, stored.start) for stored in ones] == [(stored.name, stored.start) for stored in others]
    for one, other in zip(ones, others, strict=True):
        if not same_bits(one.tensor, other.tensor):
            yield f"{when} {one.name} by {float((one.tensor.double() - other.tensor.double()).abs().max()):.1e}".strip()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: zeros of either sign differ, and NaN may equal NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
