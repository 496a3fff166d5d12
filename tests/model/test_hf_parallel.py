"""Hugging Face models under tensor, sequence and pipeline parallelism at once: gradients equal one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import CPU, batch_of, build_family
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.techniques.build import parallelize
from weft.techniques.core import ParameterLayout


class Ignored:
    """Nobody owns the gradients here: they are read off the parameters."""

    def on_microbatch(self, remaining: int) -> None: ...
    def on_backward(self, part: int, remaining: int) -> None: ...
    def on_last_forward(self, part: int) -> None: ...
    def on_last_backward(self, part: int) -> None: ...


def gradients(family: str, folder: str, tensor: int, pipeline: int, changes: dict[str, Any]) -> Any:
    """Return (loss sum, {whole name: (layout, local gradient)}) of this rank."""
    torch.set_num_threads(1)
    blueprint = build_family(family, Path(folder) / str(torch.distributed.get_rank()), **changes)
    plan = Plan(
        mesh=MeshPlan(tensor=tensor, pipeline=pipeline),
        tensor_parallel=TensorParallelPlan(sequence=tensor > 1),
        data_parallel=DataParallelPlan(zero=0),
        microbatch=MicrobatchPlan(size=2, per_step=2),
        compute=ComputePlan(precision="fp64", device="cpu"),
    )
    model = parallelize(
        blueprint, plan, Mesh(plan.mesh, CPU), seed=7, group_parameters=lambda names: dict.fromkeys(names, 0)
    )
    batches = [batch_of(blueprint, 2, seed) | {"sample_ids": torch.arange(2) + 2 * seed} for seed in (3, 4)]
    totals = model.runner.forward_backward(batches, step=0, seed=1, scale=1.0, observer=Ignored())
    found = {
        name: (part.layout[name], torch.zeros_like(p) if p.grad is None else p.grad)
        for part in model.parts
        for name, p in part.module.named_parameters()
    }
    return totals.sum.item(), found


def joined(ranks_of_stage: list[dict[str, tuple[ParameterLayout, Tensor]]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for name, (layout, gradient) in ranks_of_stage[0].items():
        parts = [rank[name][1] for rank in ranks_of_stage]
        if layout.split:
            gradient = layout.split.join(parts)
        elif layout.placement("tensor") == "partial":
            gradient = torch.stack(parts).sum(0)
        whole[layout.name] = gradient
    return whole


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"attention_dropout": 0.2}), ("qwen3", {"tie_word_embeddings": True}), ("gpt2", {}), ("bert", {})],
)
def test_gradients_equal_one_process(ranks: Any, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    [(loss, alone)] = ranks.run(1, gradients, family, str(tmp_path), 1, 1, changes)
    results = ranks.run(4, gradients, family, str(tmp_path), 2, 2, changes)
    assert results[2][0] == pytest.approx(loss, rel=1e-12)
    together: dict[str, Tensor] = {}
    for stage in (results[:2], results[2:]):
        for name, gradient in joined([found for _, found in stage]).items():
            together[name] = together.get(name, torch.zeros(())) + gradient
    expected = joined([alone])
    assert together.keys() == expected.keys()
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (together[name] - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-6 * size), name
