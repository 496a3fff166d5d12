"""Pipelines together with what wraps and owns weights: recomputation, ZeRO, tensor axis, bf16; and a stuck peer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import DecoderShape
from weft.errors import CollectiveError
from weft.model.reference.decoder import build_decoder
from weft.techniques.build import ParallelModel, parallelize
from weft.techniques.core import StepContext
from weft.techniques.pipeline.parts import cut_parts
from weft.techniques.pipeline.runner import PipelineRunner

SHAPE = DecoderShape(
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=32,
    vocabulary_size=40,
    sequence_length=9,
    dropout=0.1,
)
"""Nine tokens: two tensor ranks have sequence shards of five and four."""


def make_batches(shares: Sequence[int], data: int) -> list[dict[str, Tensor]]:
    first, batches = sum(shares[:data]), []
    for index in range(first, first + shares[data]):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(40, (2, 9), generator=generator)
        labels = torch.randint(40, (2, 9), generator=generator)
        labels[1, : index % 5] = -100
        batches.append({"tokens": tokens, "labels": labels, "sample_ids": torch.arange(2) + 2 * index})
    return batches


def run_step(plan: Plan) -> dict[str, Any]:
    """Gradients of one step as runs of flattened parameters: (name, split, start) → values."""
    torch.set_num_threads(1)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    model: ParallelModel = parallelize(
        build_decoder(SHAPE), plan, mesh, seed=11, group_parameters=lambda shapes: dict.fromkeys(shapes, 0)
    )
    batches = make_batches(plan.microbatch.shares(plan.mesh.data), mesh.index("data"))
    model.stores.begin_step()
    totals = model.runner.forward_backward(batches, step=2, seed=3, scale=0.5, observer=model.stores)
    model.stores.finish()
    runs: list[tuple[str, Any, int, Tensor]] = []
    for shard in model.stores.shards:
        assert shard.gradient is not None
        for segment in shard.segments:
            if shard.counts:
                values = shard.gradient[segment.offset : segment.offset + segment.length]
                runs.append((segment.layout.name, segment.layout.split, segment.start, values.clone()))
    return {"runs": runs, "loss": float(totals.sum), "tensor": mesh.index("tensor")}


def assemble(results: Sequence[Mapping[str, Any]], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the runs of all ranks together: by tensor rank first, then over the tensor axis."""
    locals_: dict[str, dict[int, Tensor]] = {}
    splits: dict[str, Any] = {}
    written: dict[str, int] = {}
    for result in results:
        for name, split, start, values in result["runs"]:
            shape, index = split.local_shape(like[name].shape), split.index
            splits[name] = split
            local = locals_.setdefault(name, {}).setdefault(index, torch.zeros(shape, dtype=values.dtype))
            local.view(-1)[start : start + values.numel()] = values
            written[name] = written.get(name, 0) + values.numel()
    assert written == {name: tensor.numel() for name, tensor in like.items()}, "an element counts twice or never"
    return {
        name: parts[0] if splits[name] is None else splits[name].join([parts[i] for i in sorted(parts)])
        for name, parts in locals_.items()
    }


def make_plan(schedule: str, chunks: int = 1, *, pipeline: int = 2, zero: int = 1, **others: Any) -> Plan:
    sequence, recompute = others.pop("sequence", False), others.pop("recompute", "none")
    return Plan(
        mesh=MeshPlan(pipeline=pipeline, **others),
        data_parallel=DataParallelPlan(zero=zero),
        tensor_parallel=TensorParallelPlan(sequence=sequence),
        pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks),
        microbatch=MicrobatchPlan(size=2, per_step=(3, 2) if len(others) and "shard" in others else 5),
        memory=MemoryPlan(recompute=recompute),
        compute=ComputePlan(precision="fp64"),
    )


@pytest.fixture(scope="module")
def one_process() -> dict[str, Tensor]:
    plan = Plan(microbatch=MicrobatchPlan(size=2, per_step=5), compute=ComputePlan(precision="fp64"))
    return assemble([run_step(plan)], dict(build_decoder(SHAPE).module.named_parameters()))


@pytest.mark.parametrize(
    "plan",
    [
        make_plan("zbv", 2, recompute="full"),
        make_plan("interleaved_zero_bubble", 1, recompute="selective"),
        make_plan("dualpipev", 2, recompute="full", zero=1, shard=2),
        make_plan("1f1b", zero=3, shard=2, recompute="full"),
        make_plan("interleaved_1f1b", 2, zero=2, shard=2),
        make_plan("zbv", 2, zero=3, shard=2),
        make_plan("dualpipev", 2, zero=3, shard=2),
        make_plan("interleaved_zero_bubble", 2, zero=3, shard=2, recompute="full"),
        make_plan("1f1b", tensor=2, sequence=True),
        make_plan("zbv", 2, tensor=2, sequence=True),
    ],
    ids=lambda plan: (
        f"{plan.pipeline_parallel.schedule}-{plan.mesh.tensor}-zero{plan.data_parallel.zero}-{plan.memory.recompute}"
    ),
)
def test_gradients_equal_one_process(ranks: RankPool, one_process: dict[str, Tensor], plan: Plan) -> None:
    results = ranks.run(plan.mesh.world_size, run_step, plan)
    found = assemble(results, one_process)
    whole = torch.stack([gradient.norm() for gradient in one_process.values()]).norm()
    for name, wanted in one_process.items():
        error = (found[name] - wanted).norm() / max(wanted.norm(), 1e-6 * whole)
        assert error <= 1e-10, f"{name}: {error}"


def test_bf16_runs_and_stays_close(ranks: RankPool, one_process: dict[str, Tensor]) -> None:
    plan = replace(make_plan("zbv", 2), compute=ComputePlan(precision="bf16"))
    found = assemble(ranks.run(2, run_step, plan), one_process)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    distance = sum((found[name].double() - wanted).square().sum() for name, wanted in one_process.items())
    assert distance <= 0.05**2 * sum(wanted.square().sum() for wanted in one_process.values())


def wait_for_a_stuck_peer() -> str:
    torch.set_num_threads(1)
    plan = make_plan("1f1b")
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = build_decoder(SHAPE)
    parts = cut_parts(blueprint, plan, mesh, StepContext())
    runner = PipelineRunner(parts, blueprint, plan, mesh, timeout_seconds=1)
    if mesh.rank == 0:
        time.sleep(2)
        return ""
    try:
        runner.evaluate(make_batches((5,), 0), step=0, seed=0)
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_stuck_peer_is_named(ranks: RankPool) -> None:
    message = ranks.run(2, wait_for_a_stuck_peer)[1]
    assert message.startswith("The activation of microbatch 0 did not get from rank 0 to stage 1 on rank 1: ")
    assert message.endswith("look at the end of its log first.")
