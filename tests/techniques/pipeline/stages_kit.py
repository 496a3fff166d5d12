"""What tests of pipelines share: gradients of a rank's parts, and their comparison with one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config.plan import MeshPlan, PipelineParallelPlan, Plan
from weft.techniques.core import ModelPart


@dataclass
class Recorder:
    calls: list[tuple[str, int]] = field(default_factory=list)

    def on_microbatch(self, remaining: int) -> None:
        self.calls.append(("microbatch", remaining))

    def on_backward(self, part: int, remaining: int) -> None:
        """What ZeRO-3 asks for is tested with it."""

    def on_last_forward(self, part: int) -> None:
        self.calls.append(("last_forward", part))

    def on_last_backward(self, part: int) -> None:
        self.calls.append(("last_backward", part))


def attach_views(parts: Sequence[ModelPart]) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """Give every trained parameter a gradient that is a view of one flat storage, as the buckets do."""
    views: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for part in parts:
        trained = [parameter for parameter in part.module.parameters() if parameter.requires_grad]
        flat = torch.zeros(sum(parameter.numel() for parameter in trained), dtype=torch.float64)
        offset = 0
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = flat[offset : offset + parameter.numel()].view(parameter.shape)
                views.append((parameter, parameter.grad, flat))
            offset += parameter.numel()
    return views


def summed_gradients(parts: Sequence[ModelPart], data: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum over ties and data ranks, as the stores do; by the name in the whole model, where this rank counts."""
    held: dict[str, tuple[Tensor, Any]] = {}
    for part in parts:
        for local, parameter in part.module.named_parameters():
            if parameter.grad is not None:
                held.setdefault(part.layout[local].name, (parameter.grad, part.ties.get(local)))
    for _, (gradient, tie) in sorted(held.items(), key=lambda item: item[0]):  # all stages in one order
        if tie is not None and tie.group is not None:
            dist.all_reduce(gradient, group=tie.group)
        if data is not None:
            dist.all_reduce(gradient, group=data)
    found = {name: gradient for name, (gradient, _) in held.items()}
    counted = {e.name for part in parts for e in part.layout.entries.values() if e.counts and not e.is_buffer}
    return {name: gradient for name, gradient in found.items() if name in counted}


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / max(gradient.norm(), 1e-6 * whole)
        assert error <= 1e-10, f"{name}: {error}"


def gather(results: Sequence[Mapping[str, Any]], plan: Plan) -> tuple[dict[str, Tensor], float, float]:
    """Gradients of the first data rank's pipeline, and the totals of all data ranks."""
    gradients: dict[str, Tensor] = {}
    first = results[:: plan.mesh.data]
    for result in first:
        assert not gradients.keys() & result["gradients"].keys(), "a parameter counts twice"
        gradients |= result["gradients"]
    return gradients, sum(r["totals"][0] for r in results), sum(r["totals"][1] for r in results)


def make_plan(schedule: str, chunks: int, pipeline: int, **others: Any) -> Plan:
    settings = PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks, cuts=others.pop("cuts", None))
    return Plan(mesh=MeshPlan(pipeline=pipeline, **others), pipeline_parallel=settings)
