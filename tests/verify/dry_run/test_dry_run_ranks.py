"""A rank in a dry run holds and sends what a real one does, in worlds of any size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.run.engine import create_training
from weft.verify.dry_run import dry_run_rank, dry_run_world, peers_to_ask, representative_ranks
from weft.verify.dry_run._collective_recorder import CollectiveRecorder
from weft.verify.dry_run._dry_run import _state_bytes, example_batch

SHAPE = DecoderShape(
    num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24, vocabulary_size=64, sequence_length=9
)


def recipe_of(batch: int, shape: DecoderShape = SHAPE) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=2),
        permit=PermitRecipe(precision=("fp32", "bf16")),
    )


CASES = {
    "zero1_tensor": Plan(
        mesh=MeshPlan(replicate=2, tensor=2),
        data_parallel=DataParallelPlan(zero=1),
        tensor_parallel=TensorParallelPlan(sequence=True),
        microbatch=MicrobatchPlan(size=1, per_step=2),
    ),
    "zero2_bf16": Plan(
        mesh=MeshPlan(replicate=4),
        data_parallel=DataParallelPlan(zero=2),
        microbatch=MicrobatchPlan(size=1, per_step=2),
        compute=ComputePlan(precision="bf16"),
    ),
    "zero3_hybrid": Plan(
        mesh=MeshPlan(replicate=2, shard=2),
        data_parallel=DataParallelPlan(zero=3),
        microbatch=MicrobatchPlan(size=1, per_step=1),
    ),
    "local_steps": Plan(
        mesh=MeshPlan(replicate=2, shard=2),
        data_parallel=DataParallelPlan(zero=3, local_steps=3),
        microbatch=MicrobatchPlan(size=1, per_step=1),
    ),
    "pipeline_interleaved": Plan(
        mesh=MeshPlan(pipeline=2, tensor=2),
        pipeline_parallel=PipelineParallelPlan(schedule="interleaved_1f1b", chunks_per_rank=2),
        microbatch=MicrobatchPlan(size=1, per_step=8),
    ),
}


def really(name: str) -> tuple[Any, dict[tuple[str, str], tuple[int, int]]]:
    """State bytes after a real step, and what went over the tensor and the pipeline axis in it."""
    plan = CASES[name]
    recipe = recipe_of(plan.global_batch_size)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = build_model(recipe)
    training = create_training(recipe, plan, blueprint, mesh, Recorder())
    with CollectiveRecorder(mesh) as recorder:
        training.stepper(
            [example_batch(blueprint, plan)] * max(plan.microbatch.shares(plan.mesh.data)), step=0, learning_rate=1e-3
        )
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for one in recorder.issued:
        if one.axis in ("tensor", "pipeline") and one.op in ("all_reduce", "all_gather", "send", "receive"):
            counts[one.axis, one.op] += 1
            sizes[one.axis, one.op] += one.size_bytes
    return _state_bytes(training), {key: (counts[key], sizes[key]) for key in counts}


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_equals_a_real_step(ranks: Any, name: str) -> None:
    plan = CASES[name]
    recipe = recipe_of(plan.global_batch_size)
    real = ranks.run(4, really, name)
    report = dry_run_world(recipe, plan, lambda: build_model(recipe), (0, 3))
    assert not report.problems
    for simulated, (state, passed) in zip(report.asked, (real[0], real[3]), strict=True):
        assert simulated.state == state
        reduced = passed.pop(("tensor", "all_reduce"), (0, 0))
        if name == "pipeline_interleaved":  # with sequence parallelism Gloo's reduce-scatters are all-reduces, too
            assert simulated.step_traffic["tensor", "all_reduce"][0] == reduced[0] + 1  # flags of unused parameters
        assert {key: simulated.step_traffic[key] for key in passed} == passed


def test_what_only_the_end_of_a_round_sends_is_told() -> None:
    plan = CASES["local_steps"]
    recipe = recipe_of(plan.global_batch_size)
    report = dry_run_rank(recipe, plan, lambda: build_model(recipe))
    assert ("replicate", "all_reduce") not in report.step_traffic
    assert any("all-reduce" in note and "of weights in every 3. step" in note for note in report.notes)
    assert report.state.techniques > 0
    often = replace(plan, data_parallel=DataParallelPlan(zero=3, local_steps=1))
    sent = dry_run_rank(recipe, often, lambda: build_model(recipe)).step_traffic["replicate", "all_reduce"][1]
    assert 2 * sent == report.state.techniques


def test_every_rank_of_a_large_world() -> None:
    """A world of 4,096 ranks, of which the dry run takes one in the middle; bytes follow from the plan's formulas."""
    shape = DecoderShape(
        num_layers=8, hidden_size=512, num_heads=8, num_kv_heads=8, ffn_size=1024, vocabulary_size=1024,
        sequence_length=64, tie_embeddings=False,
    )  # fmt: skip
    plan = Plan(
        mesh=MeshPlan(pipeline=4, replicate=128, tensor=8),
        data_parallel=DataParallelPlan(zero=1),
        pipeline_parallel=PipelineParallelPlan(cuts=(2, 4, 6)),
        microbatch=MicrobatchPlan(size=1, per_step=12),
        compute=ComputePlan(precision="bf16"),
    )
    recipe = recipe_of(plan.global_batch_size, shape)
    middle = representative_ranks(plan)[1]
    report = dry_run_world(recipe, plan, lambda: build_model(recipe), [middle]).asked[0]
    block = (4 * 512 * 512 + 3 * 512 * 1024) // 8 + 2 * 512
    assert report.state.weights == pytest.approx(2 * 2 * block, rel=0.005)  # buckets are padded
    assert report.state.masters == pytest.approx(4 * 2 * block / 128, rel=0.005)
    assert report.state.gradients == pytest.approx(4 * 2 * block, rel=0.005)
    sends = report.step_traffic["pipeline", "send"]
    assert sends[0] == 2 * 12 + 1  # activations, their gradients, and one header
    assert sends[1] == 2 * 12 * 64 * 512 * 2 + 80
    assert report.step_traffic["tensor", "all_reduce"][0] >= 4 * 2 * 12


REDUCTIONS = (
    # replicate, pipeline, shares, how often, reductions of a step
    (1, 1, 3, "auto", 3),
    (1, 1, (3, 2), "microbatch", 2),
    (2, 1, 2, "step", 1),
    (2, 2, 3, "microbatch", 3),
)


@pytest.mark.parametrize(("replicate", "pipeline", "shares", "every", "rounds"), REDUCTIONS)
def test_gradients_are_sent_as_often_as_the_plan_says(
    replicate: int, pipeline: int, shares: Any, every: Any, rounds: int
) -> None:
    """ZeRO-3 reduces each unit's gradients in so many microbatches, and sums copies once."""
    plan = Plan(
        mesh=MeshPlan(shard=2, replicate=replicate, pipeline=pipeline),
        data_parallel=DataParallelPlan(zero=3, reduce_every=every),
        pipeline_parallel=PipelineParallelPlan(cuts=(1,) if pipeline > 1 else None),
        microbatch=MicrobatchPlan(size=1, per_step=shares),
    )
    recipe = recipe_of(plan.global_batch_size, replace(SHAPE, num_layers=2, tie_embeddings=False))
    asked = [0] if isinstance(shares, int) else [0, 1]
    units = 2 // pipeline + 1
    for rank in asked:
        sent = dry_run_rank(recipe, plan, lambda: build_model(recipe), rank).step_traffic
        assert sent["shard", "reduce_scatter"][0] == rounds * units
        assert sent.get(("replicate", "all_reduce"), (0, 0))[0] == (units if replicate > 1 else 0)


class Divergent(nn.Module):
    """Its first rank reduces once more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            dist.all_reduce(x.detach().clone())
        return self.layer(x)


def build_divergent() -> Blueprint:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return outputs.square().sum(), torch.tensor(float(len(batch["sample_ids"])))

    return Blueprint(
        module=Divergent(),
        inputs={"x": "x"},
        loss=loss,
        initialise=None,
        example=lambda size: {"x": torch.empty(size, 4, device="meta")},
    )


def test_a_rank_that_goes_its_own_way_is_named() -> None:
    plan = Plan(mesh=MeshPlan(replicate=2), data_parallel=DataParallelPlan(zero=0))
    report = dry_run_world(recipe_of(2), plan, build_divergent)
    assert len(report.problems) == 1
    assert "rank 0 starts all_reduce of 16 bytes of float32" in report.problems[0]
    for rank in report.asked:  # its forward asks for its rank, which nobody has who only outlines it
        (left_out,) = rank.unpredicted
        assert "its forward on the meta device fails (ValueError: Default process group" in left_out
        assert not rank.unlike_predicted


def test_peers_share_a_group() -> None:
    assert peers_to_ask(MeshPlan(pipeline=2, replicate=2, tensor=2), 5) == (1, 7, 4)


def test_what_cannot_be_built_is_refused() -> None:
    plan = Plan(mesh=MeshPlan(tensor=3), microbatch=MicrobatchPlan(size=2))
    recipe = recipe_of(2)
    with pytest.raises(PlanError, match="3"):
        dry_run_rank(recipe, plan, lambda: build_model(recipe))
    assert not dist.is_initialized()
