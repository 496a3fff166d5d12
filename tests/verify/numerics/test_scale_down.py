"""Folding: fewer ranks, microbatches and blocks; every technique and pattern still there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.plan import MemoryPlan, MeshPlan, MicrobatchPlan, PipelineParallelPlan, Plan, TensorParallelPlan
from weft.errors import PlanError
from weft.techniques.tensor.settings import TensorScheme
from weft.verify.numerics import min_processes, scale_down_plan


def plan(mesh: MeshPlan, *, size: int = 1, per_step: Any = 16, **sections: Any) -> Plan:
    return Plan(mesh=mesh, microbatch=MicrobatchPlan(size=size, per_step=per_step), **sections)


LARGE = plan(
    MeshPlan(pipeline=16, shard=128, tensor=8),
    tensor_parallel=TensorParallelPlan(sequence=True),
    memory=MemoryPlan(recompute="selective"),
)


def test_three_large_axes_become_two_by_two_by_two():
    scaled = scale_down_plan(LARGE, processes=None, num_blocks=126, may_shrink=True)
    mesh = scaled.plan.mesh
    assert (mesh.pipeline, mesh.shard, mesh.replicate, mesh.tensor) == (2, 2, 1, 2)
    assert scaled.plan.tensor_parallel.sequence
    assert scaled.plan.memory.recompute == "selective"
    assert scaled.plan.microbatch == MicrobatchPlan(size=1, per_step=5)  # odd, and more than the two stages
    assert scaled.num_blocks == 3  # two stages, unequal
    assert scaled.plan.compute.device == "cpu"


def test_what_fits_is_not_folded():
    mesh = MeshPlan(replicate=2, tensor=4)
    scaled = scale_down_plan(plan(mesh), processes=None, num_blocks=12, may_shrink=True)
    assert scaled.plan.mesh == mesh


@pytest.mark.parametrize(
    ("mesh", "processes", "wanted"),
    [
        (MeshPlan(pipeline=16, replicate=64), 8, {"pipeline": 4, "replicate": 2}),  # a pipeline with middle stages
        (MeshPlan(tensor=16), 8, {"tensor": 8}),
        (MeshPlan(tensor=9), 8, {"tensor": 3}),  # what 9 divides, 3 divides, and 2 perhaps not
        (MeshPlan(shard=5, tensor=4), 4, {"shard": 2, "tensor": 2}),
        (MeshPlan(replicate=8, shard=64, tensor=8, pipeline=8), None, {"replicate": 2, "shard": 2, "tensor": 2}),
    ],
)
def test_axes(mesh: MeshPlan, processes: int | None, wanted: dict[str, int]):
    scaled = scale_down_plan(plan(mesh), processes=processes, num_blocks=64, may_shrink=True).plan.mesh
    assert {axis: getattr(scaled, axis) for axis in wanted} == wanted


@pytest.mark.parametrize(
    ("scheme", "tensor", "size", "ranks", "samples"),
    [("2d", 16, 8, 4, 2), ("2d", 9, 3, 9, 3), ("2.5d", 32, 64, 8, 4), ("3d", 64, 16, 8, 4)],
)
def test_a_grid_stays_one_of_its_kind(scheme: TensorScheme, tensor: int, size: int, ranks: int, samples: int):
    large = replace(
        plan(MeshPlan(tensor=tensor, shard=4), tensor_parallel=TensorParallelPlan(scheme=scheme)),
        microbatch=MicrobatchPlan(size=size, per_step=2),
    )
    small = scale_down_plan(large, processes=None, num_blocks=8, may_shrink=True).plan
    assert (small.mesh.tensor, small.microbatch.size, small.mesh.shard > 1) == (ranks, samples, True)


def test_too_few_processes_are_refused_with_the_number_to_use():
    with pytest.raises(PlanError, match=r"processes = 4 is too few to show pipeline 16 × tensor 8 × shard 128.*Use 8"):
        scale_down_plan(LARGE, processes=4, num_blocks=126, may_shrink=True)


def test_unequal_shares_stay_unequal():
    three = plan(MeshPlan(replicate=3, tensor=4), per_step=(11, 11, 10))
    scaled = scale_down_plan(three, processes=4, num_blocks=8, may_shrink=True).plan
    assert scaled.microbatch.shares(scaled.mesh.data) == (4, 3)
    many = plan(MeshPlan(replicate=64), per_step=(2,) * 63 + (1,))
    scaled = scale_down_plan(many, processes=4, num_blocks=8, may_shrink=True).plan
    assert scaled.microbatch.shares(scaled.mesh.data) == (2, 2, 2, 1)
    middle = plan(MeshPlan(replicate=5), per_step=(3, 3, 2, 3, 3))  # the odd one out is not among those that stay
    scaled = scale_down_plan(middle, processes=2, num_blocks=8, may_shrink=True).plan
    assert len(set(scaled.microbatch.shares(2))) == 2


def test_fewer_microbatches_than_stages_stay_fewer():
    few = plan(MeshPlan(pipeline=16, tensor=8), per_step=4)
    scaled = scale_down_plan(few, processes=8, num_blocks=64, may_shrink=True).plan
    assert max(scaled.microbatch.shares(1)) < scaled.mesh.pipeline


def test_uneven_cuts_stay_uneven():
    cuts = (7, 15, 23, 31, 39, 47, 55)  # the first stage has a block less, the last one more
    whole = plan(MeshPlan(pipeline=8, tensor=4), pipeline_parallel=PipelineParallelPlan(cuts=cuts))
    scaled = scale_down_plan(whole, processes=4, num_blocks=64, may_shrink=True)
    assert scaled.num_blocks == 3
    assert scaled.plan.pipeline_parallel.cuts == (1,)


def test_every_word_of_recompute_stays():
    words = ("full",) * 30 + ("none",) * 30 + ("selective",) * 4
    whole = plan(MeshPlan(tensor=2), memory=MemoryPlan(recompute=words))
    scaled = scale_down_plan(whole, processes=None, num_blocks=64, may_shrink=True)
    assert set(scaled.plan.memory.recompute) == {"full", "none", "selective"}
    assert len(scaled.plan.memory.recompute) == scaled.num_blocks


def test_a_model_that_cannot_shrink_keeps_its_blocks():
    whole = plan(MeshPlan(pipeline=4, replicate=8), pipeline_parallel=PipelineParallelPlan(cuts=(2, 3, 9)))
    scaled = scale_down_plan(whole, processes=4, num_blocks=12, may_shrink=False)
    assert scaled.num_blocks == 12
    assert scaled.plan.pipeline_parallel.cuts is not None
    assert len(scaled.plan.pipeline_parallel.cuts) == scaled.plan.num_stages - 1


@settings(max_examples=200, deadline=None)
@given(
    pipeline=st.integers(1, 20),
    replicate=st.integers(1, 40),
    shard=st.integers(1, 40),
    tensor=st.integers(1, 16),
    per_step=st.integers(1, 40),
    size=st.integers(1, 9),
    blocks=st.integers(20, 130),
    chunks=st.integers(1, 6),
    may_shrink=st.booleans(),
)
def test_any_plan_folds_into_one_that_keeps_its_axes(
    pipeline: int,
    replicate: int,
    shard: int,
    tensor: int,
    per_step: int,
    size: int,
    blocks: int,
    chunks: int,
    may_shrink: bool,
):
    mesh = MeshPlan(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
    schedule = "interleaved_1f1b" if pipeline > 1 and chunks > 1 and pipeline * chunks <= blocks else "1f1b"
    whole = plan(mesh, size=size, per_step=per_step)
    whole = replace(
        whole,
        pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks if schedule != "1f1b" else 1),
    )
    scaled = scale_down_plan(whole, processes=None, num_blocks=blocks, may_shrink=may_shrink)
    small = scaled.plan.mesh
    assert small.world_size <= max(8, min_processes(mesh))
    for axis in ("pipeline", "replicate", "shard", "tensor"):
        assert (getattr(small, axis) > 1) == (getattr(mesh, axis) > 1)
        assert getattr(small, axis) <= getattr(mesh, axis)
    assert tensor % small.tensor == 0
    assert scaled.plan.num_stages <= (scaled.num_blocks or 0) <= blocks
    assert scaled.plan.global_batch_size <= whole.global_batch_size
    assert (scaled.plan.microbatch.shares(small.data)[0] > 1) >= (per_step > 1 and per_step >= pipeline)


@settings(max_examples=200, deadline=None)
@given(
    shard=st.integers(1, 24),
    context=st.integers(1, 8),
    tensor=st.sampled_from([1, 2, 4]),
    processes=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_ranks_that_share_experts_out_still_do(
    shard: int, context: int, tensor: int, processes: int | None, data: st.DataObject
) -> None:
    expert = data.draw(st.sampled_from([n for n in range(1, shard * context + 1) if shard * context % n == 0]))
    mesh = MeshPlan(shard=shard, context=context, tensor=tensor, expert=expert)
    if processes is not None and processes < min_processes(mesh):
        return
    small = scale_down_plan(
        plan(mesh, size=1, per_step=3), processes=processes, num_blocks=4, may_shrink=True
    ).plan.mesh
    assert (small.expert > 1) == (expert > 1)
    assert small.shard * small.context % small.expert == 0
    assert expert % small.expert == 0, "it divides the model's experts, as the plan's does"
    assert small.world_size <= max(processes or 8, min_processes(mesh))
