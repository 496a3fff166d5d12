"""What a rank is predicted to send is what its dry run sends, and what is predicted is worked out without torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

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
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.techniques.send_trace import Outline, RankSend
from weft.verify.dry_run import dry_run_world, trace_sends
from weft.verify.program import RankProgram, differences, occasions_of, program_of

SHAPE = DecoderShape(
    num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocabulary_size=64, sequence_length=11
)


def recipe_of(plan: Plan, shape: DecoderShape = SHAPE, **optimizer: Any) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        batch=BatchRecipe(global_batch_size=plan.global_batch_size),
        optimizer=OptimizerRecipe(**optimizer),
        run=RunRecipe(steps=2),
        permit=PermitRecipe(precision=("fp32", "bf16")),
    )


def buckets(zero: int, **others: Any) -> DataParallelPlan:
    return DataParallelPlan(zero=zero, bucket_bytes=8192, first_bucket_bytes=1024, **others)  # type: ignore[arg-type]


def plan_of(mesh: MeshPlan, data: DataParallelPlan, micro: Any = 2, **others: Any) -> Plan:
    scheme = others["tensor_parallel"].scheme if "tensor_parallel" in others else "1d"
    size = {"2d": 2, "2.5d": 4, "3d": 4}.get(scheme, 1)  # as many samples as a grid cuts them into
    return Plan(mesh=mesh, data_parallel=data, microbatch=MicrobatchPlan(size=size, per_step=micro), **others)


PLANS = {
    "data": plan_of(MeshPlan(replicate=3), buckets(0)),
    "zero1_bf16": plan_of(MeshPlan(replicate=4), buckets(1), compute=ComputePlan(precision="bf16")),
    "zero2": plan_of(MeshPlan(shard=3), buckets(2), (3, 2, 2)),
    "zero2_narrow": plan_of(
        MeshPlan(shard=2), buckets(2, reduce_precision="compute"), compute=ComputePlan(precision="bf16")
    ),
    "zero3": plan_of(MeshPlan(shard=3), buckets(3)),
    "zero3_held": plan_of(MeshPlan(shard=2), buckets(3), (3, 2)),
    "hybrid": plan_of(MeshPlan(replicate=2, shard=2), buckets(3, reduce_every="step"), 3),
    "tensor": plan_of(MeshPlan(tensor=2), buckets(0)),
    "sequence": plan_of(
        MeshPlan(tensor=2, shard=2), buckets(2), tensor_parallel=TensorParallelPlan(sequence=True),
        memory=MemoryPlan(recompute=("full", "none", "selective", "full")),
    ),
    "plain_loss": plan_of(MeshPlan(tensor=2), buckets(0), memory=MemoryPlan(fused_loss=False, recompute="full")),
    "pipeline": plan_of(MeshPlan(pipeline=2, replicate=2), buckets(1), 4),
    "v_shaped": plan_of(
        MeshPlan(pipeline=2, tensor=2), buckets(0), 4, tensor_parallel=TensorParallelPlan(sequence=True),
        pipeline_parallel=PipelineParallelPlan(schedule="zbv", chunks_per_rank=2),
    ),
    "tied_over_some": plan_of(MeshPlan(pipeline=3), buckets(0), 3),
    "square": plan_of(
        MeshPlan(tensor=4, pipeline=2), buckets(0), 4, tensor_parallel=TensorParallelPlan(scheme="2d"),
        memory=MemoryPlan(recompute=("full", "none", "selective", "full")),
    ),
    "layers": plan_of(MeshPlan(tensor=8, shard=2), buckets(3), tensor_parallel=TensorParallelPlan(scheme="2.5d")),
    "cube": plan_of(
        MeshPlan(tensor=8), buckets(0), tensor_parallel=TensorParallelPlan(scheme="3d"),
        memory=MemoryPlan(fused_loss=False, recompute="full"),
    ),
    "zero3_pipeline": plan_of(MeshPlan(pipeline=2, shard=2), buckets(3, reduce_every="microbatch"), 4),
}  # fmt: skip


SMALL = replace(SHAPE, num_layers=2)
HYBRID = MeshPlan(replicate=2, shard=2)
OTHERS = {
    "bf16": (plan_of(MeshPlan(replicate=3), buckets(1, compression="bf16")), {}),
    "int8": (plan_of(MeshPlan(replicate=2, tensor=2), buckets(2, compression="int8")), {}),
    "powersgd": (plan_of(HYBRID, buckets(3, compression="powersgd", powersgd_rank=2)), {}),
    "topk": (plan_of(MeshPlan(replicate=3), buckets(2, compression="topk", topk_share=0.05)), {}),
    "onebit": (plan_of(MeshPlan(replicate=2, pipeline=2), buckets(1, compression="onebit"), 4), {}),
    "randomk": (plan_of(HYBRID, buckets(3, compression="randomk")), {}),
    "signsgd": (plan_of(MeshPlan(replicate=3), buckets(0, compression="signsgd")), {}),
    "rounds": (plan_of(HYBRID, buckets(2, local_steps=1)), {}),
    "rounds_zero3": (plan_of(HYBRID, buckets(3, local_steps=1)), {}),
    "lamb": (plan_of(MeshPlan(pipeline=2, shard=2), buckets(3), 4), {"name": "lamb"}),
    "lars": (plan_of(MeshPlan(tensor=2, shard=2), buckets(2)), {"name": "lars"}),
    "adafactor": (plan_of(MeshPlan(replicate=2, tensor=2), buckets(0)), {"name": "adafactor", "relative_step": True}),
    "adafactor_zero1": (plan_of(MeshPlan(shard=3), buckets(1)), {"name": "adafactor"}),
    "adafactor_zero2": (plan_of(MeshPlan(shard=2, tensor=2), buckets(2)), {"name": "adafactor", "relative_step": True}),
    "adafactor_zero3": (plan_of(MeshPlan(shard=3), buckets(3)), {"name": "adafactor"}),
    "adafactor_hybrid": (plan_of(HYBRID, buckets(3)), {"name": "adafactor", "relative_step": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PLANS, *OTHERS])
def test_predicted_is_what_a_dry_run_sends(name: str) -> None:
    plan, optimizer = OTHERS[name] if name in OTHERS else (PLANS[name], {})
    recipe = recipe_of(plan, SMALL if name in OTHERS else SHAPE, **optimizer)
    report = dry_run_world(recipe, plan, lambda: build_model(recipe), (0, plan.mesh.world_size - 1))
    for rank in report.asked:
        assert rank.issued
        assert rank.unpredicted == ()
        assert rank.unlike_predicted == ()


def test_every_wrong_count_and_size_is_told() -> None:
    one = RankSend(operation="all_reduce", axis="data", size_bytes=8, count=2, technique="data", reason="gradients")
    late = replace(one, size_bytes=16, count=1, when="first")
    program = RankProgram((one, late))
    assert differences(program.traffic(), Counter({("data", "all_reduce", 8): 2})) == []
    assert differences(program.traffic("first"), Counter({("data", "all_reduce", 8): 3, ("data", "send", 1): 1})) == [
        "all_reduce over data of 8 bytes: 2 predicted, 3 seen",
        "all_reduce over data of 16 bytes: 1 predicted, 0 seen",
        "send over data of 1 bytes: 0 predicted, 1 seen",
    ]


def _counts(program: RankProgram) -> list[tuple[str, int]]:
    return sorted({(send.operation, send.size_bytes) for send in program.sends if send.axis == "tensor"})


def test_labels_decide_what_the_fused_loss_sends() -> None:
    plan = PLANS["tensor"]
    recipe = recipe_of(plan)
    outline = trace_sends(build_model(recipe))
    gathered = {
        send.size_bytes
        for send in program_of(recipe, plan, outline, labels=[5, 0]).sends
        if send.operation == "all_gather"
    }
    assert gathered == {2 * 5 * 2 * 4}  # two numbers of four bytes, per label and rank; none where nothing counts
    assert ("all_gather", 2 * 11 * 2 * 4) in _counts(program_of(recipe, plan, outline))


def test_a_program_is_worked_out_without_torch() -> None:
    code = "import sys, weft.verify.program, weft.techniques.send_trace; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_rows_of_a_table_are_predicted_by_how_many_there_are() -> None:
    plan = PLANS["data"]
    module = nn.Sequential(nn.Embedding(64, 6, sparse=True), nn.Linear(6, 4)).float()
    blueprint = Blueprint(
        module=module,
        inputs={"input": "tokens"},
        loss=lambda outputs, batch: (outputs.sum(), torch.tensor(1.0)),
        initialise=None,
        example=lambda size: {"tokens": torch.empty(size, 3, dtype=torch.int64, device="meta")},
    )
    program = program_of(recipe_of(plan), plan, trace_sends(blueprint))
    counts, rows = ("data", "all_gather", 3 * 8), program.traffic(rows={("0.weight", 0): 5})
    assert program.traffic()[counts] == 1  # of three ranks, how many rows each has
    assert rows - program.traffic() == {("data", "all_gather", 3 * 5 * 8): 1, ("data", "all_gather", 3 * 5 * 6 * 4): 1}


def test_what_is_special_about_a_step_follows_from_the_plan() -> None:
    rounds = plan_of(MeshPlan(replicate=2), buckets(0, local_steps=3))
    recipe = replace(recipe_of(rounds), run=RunRecipe(steps=5))
    of = partial(occasions_of, recipe, some_unused=False)
    assert [of(rounds, step, is_first=step == 0) for step in range(5)] == [("first",), (), ("round",), (), ("round",)]
    signs = plan_of(MeshPlan(replicate=2), buckets(0, compression="onebit", onebit_warmup_steps=2))
    assert [of(signs, step, is_first=False) for step in (1, 2)] == [("warm_up",), ("after_warm_up",)]


def test_an_outline_is_of_the_whole_model() -> None:
    plan = PLANS["data"]
    blueprint: Blueprint = build_model(recipe_of(plan))
    outline: Outline = trace_sends(blueprint)
    assert outline.names["embedding.weight"] == ("embedding.weight", "head.weight")
    assert outline.by_name["blocks.0.attention.query.weight"].split == (0, 1)
    assert outline.by_name["blocks.0.ffn.down.weight"].split == (1, 1)
    assert [entry.shape for entry in outline.entries] == [(2, 11, 32)] * 4
    reads = [
        call.source for call in outline.calls if call.module.startswith("blocks.0.attention") and call.kind == "column"
    ]
    assert len(reads) == 3
    assert len(set(reads)) == 1  # query, key and value read one tensor
    downs = [call for call in outline.calls if call.module.endswith("ffn.down")]
    assert not any(call.is_exit_repeated for call in downs)  # nothing is kept behind a block's last sum
