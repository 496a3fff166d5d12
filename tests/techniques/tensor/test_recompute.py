"""Recomputation changes memory and time, nothing else; compilation runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import small
import torch
from torch.utils.checkpoint import checkpoint

import parity
from weft.config.plan import ComputePlan, MemoryPlan, MeshPlan, PipelineParallelPlan, Plan
from weft.errors import PlanError
from weft.techniques.compute.compiling import apply_compile
from weft.techniques.recompute.blocks import apply_recompute


@pytest.mark.parametrize("recompute", ["full", "selective", ("selective", "full")], ids=str)
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_equal_one_process(ranks, recompute, sequence):
    plan = parity.plan_of(2, sequence, recompute)
    for make in (partial(small.decoder, 9, 0.2), partial(small.fused, 5, 0.2)):
        for loss, gradients in ranks.run(2, parity.compare, make, plan):
            assert loss <= 1e-12
            assert gradients <= 1e-10


def interleaved(recompute: str) -> float:
    """Two forwards before the first backward, as a pipeline does it."""
    blueprint, batches = small.decoder(9, 0.3)
    found = []
    for word in (recompute, "none"):
        built = parity.build(blueprint, parity.plan_of(recompute=word))
        losses = []
        for batch in batches:
            state = parity.MicrobatchState(seed=1, step=1, sample_ids=batch["sample_ids"], sequence_length=9)
            with built.context.entered(state):
                losses.append(blueprint.loss(built.part(batch["tokens"]), batch)[0])
        for loss in losses:
            loss.backward()
        found.append(parity.whole_gradients(built))
    return parity.largest_difference(*found)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_keys_of_the_right_microbatch_are_put_back(ranks, recompute):
    assert ranks.run(1, interleaved, recompute)[0] <= 1e-12


def saved_bytes(recompute: str) -> int:
    """Bytes that autograd keeps between forward and backward, weights left out."""
    blueprint, batches = small.decoder(64, 0.1)
    built = parity.build(blueprint, parity.plan_of(recompute=recompute, precision="fp32"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.part.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = batches[0]
    state = parity.MicrobatchState(seed=1, step=1, sample_ids=batch["sample_ids"], sequence_length=64)
    with built.context.entered(state), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = built.part(batch["tokens"])
    del output
    return sum(kept.values())


def test_full_keeps_a_fraction(ranks):
    none, full = (ranks.run(1, saved_bytes, word)[0] for word in ("none", "full"))
    assert full < 0.2 * none


def test_list_must_name_every_block():
    blueprint, _ = small.decoder()
    plan = Plan(memory=MemoryPlan(recompute=("full",)))
    with pytest.raises(PlanError, match="lists 1 blocks, but the model has 2"):
        apply_recompute(blueprint.module, blueprint, plan, parity.StepContext())


def test_split_backward_refuses_compiled_blocks():
    blueprint, _ = small.decoder()
    plan = Plan(
        mesh=MeshPlan(pipeline=2),
        pipeline_parallel=PipelineParallelPlan(schedule="zbv"),
        compute=ComputePlan(compile=True),
    )
    with pytest.raises(PlanError, match="does not go with schedule"):
        apply_compile(blueprint.module, blueprint, plan, parity.StepContext())


class Writes(torch.nn.Module):
    """A block whose matrix products are written to in place, inside and by whoever calls it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = (torch.nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(2))
        self.how = how

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        if self.how == "inside":
            y.tanh_()
        elif self.how == "a part":
            y[:, :3].mul_(x[:, :3])
        elif self.how == "unsafe":
            halves = y.unsafe_chunk(2, 1)
            halves[0].add_(x[:, 3:].exp())
            y = torch.cat(halves, 1)
        elif self.how == "twice":
            y.add_(x).relu_()
            y = self.first(y).sigmoid_()
        return y, self.second(torch.sin(y * x)).sin()


def gradients_of(how: str, contexts: Any) -> list[torch.Tensor]:
    block = Writes(how)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6).requires_grad_()
    run = block if contexts is None else partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    y, z = run(x)
    if how == "outside":
        y = y.add_(1.0) if contexts is not None else y + 1.0
    (y.sum() + z.square().sum()).backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["none", "inside", "a part", "unsafe", "twice", "outside"])
def test_what_is_written_in_place_is_computed_again(how: str):
    from weft.techniques.recompute import blocks as recompute  # the modes are its own

    for found, expected in zip(gradients_of(how, recompute._contexts), gradients_of(how, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
