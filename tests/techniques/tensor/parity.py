"""What the tests of this room share: a model under a plan on this rank, and its whole gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import Mesh
from weft.config.plan import ComputePlan, MemoryPlan, MeshPlan, Plan, TensorParallelPlan
from weft.model.blueprint import Batch, Blueprint
from weft.techniques.compute.compiling import apply_compile
from weft.techniques.core import MicrobatchState, ModelLayout, StepContext, materialise
from weft.techniques.data.batch_norm import apply_batch_norm
from weft.techniques.fused_loss.vocabulary import apply_fused_loss
from weft.techniques.randomness.keyed_dropout import apply_keyed_dropout
from weft.techniques.recompute.blocks import apply_recompute
from weft.techniques.tensor.layers import apply_tensor
from weft.techniques.tensor.sequence import apply_sequence

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SEED = 7


@dataclass
class Built:
    part: nn.Module
    blueprint: Blueprint
    plan: Plan
    mesh: Mesh
    context: StepContext
    layout: ModelLayout


def plan_of(
    tensor: int = 1,
    sequence: bool = False,
    recompute: str | tuple[str, ...] = "none",
    fused: bool = True,
    compile: bool = False,
    precision: str = "fp64",
    replicate: int = 1,
) -> Plan:
    return Plan(
        mesh=MeshPlan(tensor=tensor, replicate=replicate),
        tensor_parallel=TensorParallelPlan(sequence=sequence),
        memory=MemoryPlan(recompute=recompute, fused_loss=fused),
        compute=ComputePlan(precision=precision, compile=compile),
    )


def build(blueprint: Blueprint, plan: Plan) -> Built:
    """The order of the house: tensor, sequence, dropout, batch norm, loss, storage, recompute, compile."""
    torch.set_num_threads(1)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    part, context, layout = copy.deepcopy(blueprint.module), StepContext(), ModelLayout()
    apply_tensor(part, blueprint, plan, mesh, context, layout)
    apply_sequence(part, blueprint, plan, mesh, context, layout)
    apply_keyed_dropout(part, blueprint, mesh, context, sequence=plan.tensor_parallel.sequence)
    apply_batch_norm(part, mesh)
    apply_fused_loss(part, blueprint, plan, mesh, layout, context)
    materialise(part, blueprint, layout, SEED, torch.device("cpu"), DTYPES[plan.compute.precision])
    apply_recompute(part, blueprint, plan, context)
    apply_compile(part, blueprint, plan, context, backend="eager")  # traced by Dynamo, without the minutes of Inductor
    part.train()
    return Built(part, blueprint, plan, mesh, context, layout)


def forward_backward(built: Built, microbatches: Sequence[Batch], step: int = 3) -> Tensor:
    """Add up gradients as a runner does, and return the summed loss."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in microbatches:
        tokens = batch.get("tokens")
        state = MicrobatchState(
            seed=SEED,
            step=step,
            sample_ids=batch["sample_ids"],
            sequence_length=None if tokens is None else tokens.shape[1],
        )
        with built.context.entered(state):
            outputs = built.part(
                **{key: batch[field] for key, field in built.blueprint.inputs.items() if field in batch}
            )
            loss, _ = built.blueprint.loss(outputs, batch)
        loss.backward()
        total += loss.detach()
    return total


def whole_gradients(built: Built) -> dict[str, Tensor]:
    """Gradients by the names of the whole model, joined over the tensor group."""
    view, found = built.mesh["tensor"], dict[str, Tensor]()
    for name, parameter in built.part.named_parameters():
        entry = built.layout[name]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if entry.placement("tensor") == "partial":
            all_reduce(grad, view)
        if entry.split:
            grad = entry.split.join(list(all_gather(grad, view).unbind(0)))
        assert grad.shape == entry.shape, name
        found[entry.name] = grad
    return found


def largest_difference(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest ‖Δ‖ / max(‖g‖, 1e-6·‖G‖) over the tensors."""
    assert mine.keys() == wanted.keys()
    whole = torch.stack([grad.double().norm() for grad in wanted.values()]).norm()
    return max(
        float((mine[name].double() - grad.double()).norm() / torch.maximum(grad.double().norm(), 1e-6 * whole))
        for name, grad in wanted.items()
    )


def compare(make: Callable[[], tuple[Blueprint, Sequence[Batch]]], plan: Plan) -> tuple[float, float]:
    """Run on every rank: relative differences of the loss and of the gradients between `plan` and one process."""
    blueprint, microbatches = make()
    split, alone = build(blueprint, plan), build(blueprint, plan_of(precision=plan.compute.precision))
    loss, wanted = (forward_backward(built, microbatches) for built in (split, alone))
    difference = largest_difference(whole_gradients(split), whole_gradients(alone))
    return float((loss - wanted).abs() / wanted.abs()), difference
