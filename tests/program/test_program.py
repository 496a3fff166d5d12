"""What a rank is predicted to send is what its dry run sends, and what is predicted is worked out without torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from weft.models import Blueprint, build_model
from weft.outline import Outline, RankSend
from weft.plan import (
    ComputePlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.program import RankProgram, differences, program_of
from weft.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.rehearse import outline_of, rehearse_world

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
    return Plan(mesh=mesh, data_parallel=data, microbatch=MicrobatchPlan(size=1, per_step=micro), **others)


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
    "zero3_pipeline": plan_of(MeshPlan(pipeline=2, shard=2), buckets(3, reduce_every="microbatch"), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_predicted_is_what_a_dry_run_sends(name: str) -> None:
    plan = PLANS[name]
    recipe = recipe_of(plan)
    report = rehearse_world(recipe, plan, lambda: build_model(recipe), (0, plan.mesh.world_size - 1))
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
    outline = outline_of(build_model(recipe))
    gathered = {
        send.size_bytes
        for send in program_of(recipe, plan, outline, labels=[5, 0]).sends
        if send.operation == "all_gather"
    }
    assert gathered == {2 * 5 * 2 * 4}  # two numbers of four bytes, per label and rank; none where nothing counts
    assert ("all_gather", 2 * 11 * 2 * 4) in _counts(program_of(recipe, plan, outline))


def test_a_program_is_worked_out_without_torch() -> None:
    code = "import sys, weft.program, weft.outline; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


LEFT_OUT = {
    "local_steps": (plan_of(MeshPlan(replicate=2, shard=2), buckets(3, local_steps=3)), "adamw", "end of a round"),
    "lamb": (PLANS["data"], "lamb", "that lamb makes"),
    "int8": (plan_of(MeshPlan(replicate=2), buckets(0, compression="int8")), "adamw", "in place of gradients"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_not_predicted_is_named(name: str) -> None:
    plan, optimizer, words = LEFT_OUT[name]
    recipe = recipe_of(plan, name=optimizer)
    (sentence,) = program_of(recipe, plan, outline_of(build_model(recipe))).unpredicted
    assert words in sentence


def test_an_outline_is_of_the_whole_model() -> None:
    plan = PLANS["data"]
    blueprint: Blueprint = build_model(recipe_of(plan))
    outline: Outline = outline_of(blueprint)
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
