"""Which plans fit a recipe, and what is said of those that do not."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from noun_examples import PLAN, SMALL, case, recipe_of

from weft.config.plan import (
    ComputePlan,
    ContextParallelPlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    ModelFacts,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
    parse_plan,
)
from weft.config.recipe import ConvNetShape, MlpShape, ModelRecipe, OptimizerRecipe, PermitRecipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.techniques.check import check_plan, check_runnable, runnability
from weft.techniques.zero.contract import reduction_conflict, reduction_rounds


def plan_of(mesh: dict[str, Any], size: int = 1, per_step: int | tuple[int, ...] = 1, **more: Any) -> Plan:
    return Plan(mesh=MeshPlan(**mesh), microbatch=MicrobatchPlan(size=size, per_step=per_step), **more)


def pipelined(
    schedule: Any, pipeline: int = 2, chunks: int = 1, cuts: tuple[int, ...] | None = None, **more: Any
) -> Plan:
    chosen = PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks, cuts=cuts)
    return plan_of({"pipeline": pipeline}, size=4, per_step=16, pipeline_parallel=chosen, **more)


GOOD: list[tuple[Plan, int]] = [
    (plan_of({}, size=64), 1),
    (plan_of({"replicate": 2}, size=4, per_step=8), 2),
    (plan_of({"replicate": 3}, size=2, per_step=(11, 11, 10)), 3),
    (plan_of({"shard": 2, "replicate": 2}, per_step=16, data_parallel=DataParallelPlan(zero=3)), 4),
    (plan_of({"tensor": 4}, per_step=64, tensor_parallel=TensorParallelPlan(sequence=True)), 4),
    (plan_of({"pipeline": 2, "tensor": 2, "replicate": 2}, size=4, per_step=8), 8),
    (pipelined("gpipe", 12), 12),
    (pipelined("1f1b", 2, cuts=(7,), compute=ComputePlan(compile=True)), 2),
    (pipelined("interleaved_1f1b", 2, 3), 2),
    (pipelined("interleaved_zero_bubble", 2, 1), 2),
    (pipelined("zbv", 2, 2, cuts=(2, 5, 8)), 2),
    (pipelined("dualpipev", 3, 2), 3),
    (plan_of({}, size=64, memory=MemoryPlan(recompute=("full",) * 12)), 1),
]


@pytest.mark.parametrize(("plan", "world"), GOOD)
def test_good_plans_pass(plan: Plan, world: int) -> None:
    check_plan(*case(plan), world)
    check_runnable(plan)
    assert plan.is_predictable


BAD: list[tuple[Plan, int | None, str]] = [
    (
        plan_of({"replicate": 2}, size=4, per_step=8),
        8,
        (
            "plan.mesh makes 2 processes (data 2), but there are 8.\nUse replicate "
            "= 8, or tensor = 4, or pipeline = 4, or 2 processes."
        ),
    ),
    (
        plan_of({"shard": 4, "tensor": 2}, per_step=16),
        6,
        "plan.mesh makes 8 processes (data 4 × tensor 2), but there are 6.\nUse shard = 3, or 8 processes.",
    ),
    (
        plan_of({"tensor": 3}, size=64),
        3,
        (
            "plan.mesh.tensor = 3 does not divide num_heads = 8, num_kv_heads = 4, "
            "ffn_size = 1408, vocabulary_size = 8192.\nUse 1, 2 or 4."
        ),
    ),
    (plan_of({"tensor": 8}, size=64), 8, "plan.mesh.tensor = 8 does not divide num_kv_heads = 4.\nUse 1, 2 or 4."),
    (
        plan_of({}, size=64, tensor_parallel=TensorParallelPlan(sequence=True)),
        1,
        "plan.tensor_parallel.sequence = true has no effect with mesh.tensor = 1",
    ),
    (
        plan_of({}, size=64, context_parallel=ContextParallelPlan(scheme="ulysses")),
        1,
        'plan.context_parallel.scheme = "ulysses" has no effect with mesh.context = 1.\nUse "ring"',
    ),
    (
        plan_of({"replicate": 4}, size=3, per_step=4),
        4,
        "plan.microbatch.per_step = 4 makes a global batch of 3 × 4 × 4 data "
        "ranks = 48, but the recipe's global_batch_size is 64.\n"
        "Use size = 2 and per_step = 8.",
    ),
    (plan_of({"replicate": 4}, size=4, per_step=3), 4, "Use per_step = 4."),
    (plan_of({"replicate": 3}, size=4, per_step=5), 3, "Use per_step = [6, 5, 5]."),
    (
        plan_of({"replicate": 2}, size=4, per_step=(8, 7)),
        2,
        "plan.microbatch.per_step = [8, 7] makes a global batch of 4 × (8 + 7) = 60",
    ),
    (
        plan_of({"replicate": 2}, size=4, per_step=(6, 5, 5)),
        2,
        "plan.microbatch.per_step = [6, 5, 5] has 3 shares for 2 data ranks (replicate × shard).\nUse per_step = 8.",
    ),
    (
        plan_of({"replicate": 65}),
        65,
        (
            "plan.mesh makes 65 data ranks, and the recipe's global_batch_size = "
            "64 has no sample for some.\nUse 64 data ranks or fewer."
        ),
    ),
    (
        plan_of({"pipeline": 13}, size=64),
        13,
        "plan.mesh.pipeline = 13 makes 13 stages of 12 blocks: some would be empty.\nUse 12 or less.",
    ),
    (
        pipelined("zbv", 7, 2),
        7,
        "plan.mesh.pipeline = 7 makes 7 × 2 chunks stages of 12 blocks: some would be empty.\nUse 6 or less.",
    ),
    (
        pipelined("1f1b", 1, cuts=(3,)),
        1,
        "plan.pipeline_parallel.cuts = [3] has no effect with mesh.pipeline = 1.\nRemove it.",
    ),
    (
        pipelined("zbv", 1),
        1,
        'plan.pipeline_parallel.schedule = "zbv" has no effect with mesh.pipeline = 1.\nUse "1f1b", or more',
    ),
    (
        pipelined("1f1b", 1, 2),
        1,
        "plan.pipeline_parallel.chunks_per_rank = 2 has no effect with mesh.pipeline = 1.\nUse 1, or",
    ),
    (
        pipelined("1f1b", 2, 2),
        2,
        'plan.pipeline_parallel.chunks_per_rank = 2 does not fit schedule = "1f1b", which has exactly 1.\nUse 1.',
    ),
    (
        pipelined("interleaved_1f1b", 2, 1),
        2,
        'does not fit schedule = "interleaved_1f1b", which has 2 or more.\nUse 2.',
    ),
    (pipelined("dualpipev", 2, 3), 2, 'does not fit schedule = "dualpipev", which has exactly 2.\nUse 2.'),
    (
        pipelined("1f1b", 4, cuts=(3, 6)),
        4,
        (
            "plan.pipeline_parallel.cuts = [3, 6] has 2 places to cut, and 4 "
            "stages have 3.\nUse [3, 6, 9], or leave cuts out"
        ),
    ),
    (pipelined("1f1b", 2, cuts=(12,)), 2, "plan.pipeline_parallel.cuts = [12] goes past the last block, 11.\nUse [6]"),
    (
        pipelined("zbv", 2, 2, compute=ComputePlan(compile=True)),
        2,
        'plan.compute.compile = true cannot join schedule = "zbv", whose backward comes in two passes',
    ),
    (
        plan_of({"shard": 2}, size=32, data_parallel=DataParallelPlan(zero=0)),
        2,
        (
            "plan.mesh.shard = 2 has nothing to shard with data_parallel.zero = "
            "0.\nUse replicate = 2 and shard = 1, or zero = 1, 2 or 3."
        ),
    ),
    (
        plan_of({"replicate": 2}, size=32, data_parallel=DataParallelPlan(zero=3)),
        2,
        "plan.data_parallel.zero = 3 shards the weights over mesh.shard only, "
        "which is 1: every rank would hold all of them.\n"
        "Use replicate = 1 and shard = 2, or zero = 1 or 2",
    ),
    (
        plan_of({}, size=64, compute=ComputePlan(precision="bf16")),
        1,
        'plan.compute.precision = "bf16" is not permitted by the recipe, whose permit.precision = ["fp32"].\n'
        'Use "fp32", or permit.precision = ["fp32", "bf16"].',
    ),
    (
        plan_of({}, size=64, data_parallel=DataParallelPlan(compression="int8")),
        1,
        (
            'plan.data_parallel.compression = "int8" is not permitted by the '
            'recipe.\nUse "none", or permit.compression = ["int8"].'
        ),
    ),
    (
        plan_of({}, size=64, memory=MemoryPlan(recompute=("full", "none"))),
        1,
        'plan.memory.recompute = ["full", "none"] has 2 words for 12 blocks.\nGive one word for all, or 12.',
    ),
    (
        plan_of({"expert": 3, "shard": 2}, size=32),
        2,
        "plan.mesh.expert = 3 has nothing to share out: a decoder has no mixtures that ranks can take apart.\nUse 1.",
    ),
]


@pytest.mark.parametrize(("plan", "world", "message"), BAD, ids=[message[:60] for _, _, message in BAD])
def test_bad_plans_are_refused_with_the_change_to_make(plan: Plan, world: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(*case(plan), world)


def test_the_changes_that_are_advised_work() -> None:
    plan, recipe, facts = case(plan_of({"replicate": 4}, size=2, per_step=8))
    check_plan(plan, recipe, facts, 4)
    for shares in ((11, 11, 10), (22, 21, 21)):
        size = 64 // sum(shares)
        check_plan(*case(plan_of({"replicate": 3}, size=size, per_step=shares)), 3)


def test_a_file_is_named_where_the_setting_stands() -> None:
    plan = parse_plan(PLAN.replace("size = 4", "size = 3"), name="mine.toml")
    message = "mine.toml, line 13: microbatch.per_step = 16 makes a global batch of 3 × 16 × 1 data ranks = 48"
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(*case(plan), 4)


def test_batch_statistics_need_the_whole_batch_at_once() -> None:
    net = ConvNetShape(num_layers=4, channels=8)
    check_plan(*case(plan_of({"replicate": 2}, size=32), net), 2)
    with pytest.raises(PlanError, match=re.escape("Use microbatch.size = 32 and per_step = 1.")):
        check_plan(*case(plan_of({"replicate": 2}, size=8, per_step=4), net), 2)
    message = "Use 2 data ranks with microbatch.size = 32 and per_step = 1, or a global batch that 3 divides."
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(*case(plan_of({"replicate": 3}, size=2, per_step=(11, 11, 10)), net), 3)
    check_plan(*case(plan_of({"replicate": 2}, size=8, per_step=4), dataclasses.replace(net, norm="group")), 2)


def test_models_without_heads_or_sequences() -> None:
    with pytest.raises(
        PlanError, match="plan.mesh.tensor = 2 has nothing to split: a tree has no layers for the tensor"
    ):
        check_plan(plan_of({"tensor": 2}, size=64), recipe_of(), ModelFacts(name="tree", divisible={}), 2)
    check_plan(*case(plan_of({"tensor": 2}, size=64), ConvNetShape(num_layers=4, channels=8)), 2)
    with pytest.raises(PlanError, match="plan.mesh.tensor = 2 does not divide channels = 7"):
        check_plan(*case(plan_of({"tensor": 2}, size=64), ConvNetShape(num_layers=4, channels=7)), 2)
    mlp = MlpShape(num_layers=2, input_size=4, hidden_size=4, num_classes=2)
    check_plan(*case(plan_of({"tensor": 2}, size=64), mlp), 2)
    with pytest.raises(
        PlanError, match="plan.tensor_parallel.sequence = true has no sequence to split: samples of a mlp"
    ):
        check_plan(*case(plan_of({"tensor": 2}, size=64, tensor_parallel=TensorParallelPlan(sequence=True)), mlp), 2)


def test_a_loss_that_is_no_sum_over_samples_sees_them_all_at_once() -> None:
    recipe, facts = recipe_of(), ModelFacts(per_sample_loss=False)
    alone = facts.limited("gathered_loss", "its forward numbers samples")
    for known in (facts, alone):
        check_plan(plan_of({"tensor": 2}, size=64), recipe, known, 2)
        with pytest.raises(PlanError, match=r"no sum over samples(.|\n)*microbatch.size = 64 and per_step = 1."):
            check_plan(plan_of({}, size=32, per_step=2), recipe, known)
    message = (
        r"cannot gather them: its forward numbers samples\.\n.*mesh.shard = 1, microbatch.size = 64 and per_step = 1"
    )
    with pytest.raises(PlanError, match=message):
        check_plan(plan_of({"replicate": 2}, size=32), recipe, alone)


def test_data_ranks_gather_what_a_loss_must_see() -> None:
    recipe, facts = recipe_of(), ModelFacts(per_sample_loss=False, num_blocks=4)
    check_plan(plan_of({"replicate": 2}, size=32), recipe, facts)
    check_plan(plan_of({"shard": 2, "tensor": 2}, size=32), recipe, facts)
    check_plan(plan_of({"pipeline": 2}, size=64), recipe, facts)
    refused = {
        r"a part of the batch at a time(.|\n)*microbatch.size = 32 and per_step = 1": plan_of(
            {"replicate": 2}, size=16, per_step=2
        ),
        r"Use 2 data ranks with microbatch.size = 32 and per_step = 1": plan_of(
            {"replicate": 3}, size=2, per_step=(11, 11, 10)
        ),
        r"pipeline = 2 cuts the model(.|\n)*Use 1, or one data rank": plan_of({"replicate": 2, "pipeline": 2}, size=32),
        r"compile = true leaves no place(.|\n)*Use false": plan_of(
            {"replicate": 2}, size=32, compute=ComputePlan(compile=True)
        ),
    }
    for message, plan in refused.items():
        with pytest.raises(PlanError, match=message):
            check_plan(plan, recipe, facts)


def test_what_is_not_known_is_not_checked() -> None:
    check_plan(plan_of({"tensor": 3, "pipeline": 20}, size=64), recipe_of(), ModelFacts(), 60)


def test_grids_are_of_models_whose_forward_is_known() -> None:
    grid = plan_of({"tensor": 4}, size=64, tensor_parallel=TensorParallelPlan(scheme="2d"))
    check_plan(*case(grid), 4)
    own = dataclasses.replace(recipe_of(), model=ModelRecipe(factory="own.models:build"))
    message = (
        'plan.tensor_parallel.scheme = "2d" cannot be had for this model: how features meet is known only of Weft\'s'
        ' decoder and encoder and families with a file.\nUse "1d".'
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(grid, own, facts_of(own), 4)


def test_permits_open_what_they_name() -> None:
    recipe = recipe_of(permit=PermitRecipe(precision=("fp32", "bf16"), compression=("int8",)))
    plan = plan_of(
        {"replicate": 2},
        size=32,
        compute=ComputePlan(precision="bf16"),
        data_parallel=DataParallelPlan(compression="int8"),
    )
    check_plan(plan, recipe, facts_of(recipe), 2)
    with pytest.raises(PlanError, match=re.escape("has no effect with 1 data rank")):
        check_plan(plan_of({}, size=64, data_parallel=plan.data_parallel), recipe, facts_of(recipe))


def test_settings_of_a_codec_that_is_not_used_are_refused() -> None:
    for settings, message in (
        ({"powersgd_rank": 8}, 'powersgd_rank = 8 has no effect with compression = "none"'),
        ({"compression": "int8", "topk_share": 0.1}, 'topk_share = 0.1 has no effect with compression = "int8"'),
        ({"compression": "topk", "topk_share": 1.5}, "topk_share = 1.5 must be at least 0 and at most 1"),
        ({"compression": "powersgd", "powersgd_rank": 0}, "powersgd_rank = 0 is too small"),
        ({"compression": "signsgd", "randomk_share": 0.5}, "randomk_share = 0.5 has no effect with compression ="),
        ({"compression": "randomk", "randomk_share": 0.0}, "randomk_share = 0.0 must be a finite number above 0"),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            DataParallelPlan(**settings)  # type: ignore[arg-type]  # on purpose


def test_compressions_that_cannot_be_joined_say_why() -> None:
    def reasons(mesh: dict[str, int], precision: str = "fp32", **data: object) -> list[str]:
        compute = ComputePlan(precision=precision)  # type: ignore[arg-type]
        return runnability(plan_of(mesh, compute=compute, data_parallel=DataParallelPlan(**data)))  # type: ignore[arg-type]

    assert reasons({"replicate": 2}, compression="int8") == []
    assert reasons({"replicate": 2, "shard": 2}, zero=3, compression="powersgd") == []
    assert reasons({"replicate": 2}, "fp16", compression="int8") == []
    (told,) = reasons({"shard": 2}, zero=3, compression="int8")
    assert "cannot join data_parallel.zero = 3 with mesh.replicate = 1" in told
    (told,) = reasons({"replicate": 2}, "bf16", compression="int8", reduce_precision="compute")
    assert 'cannot join data_parallel.reduce_precision = "compute"' in told
    assert reasons({"replicate": 2, "shard": 2}, zero=3, compression="signsgd") == []
    (told,) = reasons({"replicate": 2}, zero=2, compression="onebit")
    assert "1-bit Adam sends momenta, which go on once per step. Use zero = 0 or 1." in told
    assert reasons({"replicate": 2, "pipeline": 2}, zero=2, compression="onebit") == []
    assert reasons({"replicate": 2}, zero=2, compression="onebit", reduce_every="step") == []
    for codec in ("topk", "powersgd", "onebit", "randomk", "signsgd"):
        (told,) = reasons({"replicate": 2}, "fp16", compression=codec)
        assert "in units of the loss scale" in told
    (told,) = reasons({"replicate": 2}, compression="fp8")
    assert "can be predicted but not run yet: the engine has not got this compression" in told


def test_1_bit_adam_needs_an_adamw_that_is_not_clipped_and_a_warm_up() -> None:
    def told(optimizer: OptimizerRecipe, **data: Any) -> str:
        recipe = dataclasses.replace(recipe_of(permit=PermitRecipe(compression=("onebit",))), optimizer=optimizer)
        plan = plan_of({"replicate": 2}, size=32, data_parallel=DataParallelPlan(compression="onebit", **data))
        try:
            check_plan(plan, recipe, facts_of(recipe), 2)
        except PlanError as error:
            return str(error)
        return ""

    free, sgd = OptimizerRecipe(max_grad_norm=None), OptimizerRecipe(max_grad_norm=None, name="sgd")
    assert told(free, onebit_warmup_steps=2) == ""
    assert "onebit_warmup_steps = 10 is as long as the run of 10 steps" in told(free, onebit_warmup_steps=10)
    assert "Use 2." in told(free, onebit_warmup_steps=10)
    assert 'is a way to run AdamW, and optimizer.name = "sgd"' in told(sgd, onebit_warmup_steps=2)
    assert 'in TOML, max_grad_norm = "none"' in told(OptimizerRecipe(), onebit_warmup_steps=2)


def test_reductions_after_every_microbatch_are_refused_where_they_mean_nothing_or_cannot_match() -> None:
    def told(mesh: dict[str, int], schedule: Any = "1f1b", chunks: int = 1, shares: Any = 8, **data: Any) -> str | None:
        plan = plan_of(
            {**mesh},
            per_step=shares,
            data_parallel=DataParallelPlan(**data),
            pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks),
        )
        return reduction_conflict(plan)

    each = {"reduce_every": "microbatch"}
    piped = {"shard": 2, "pipeline": 2}
    for zero in (0, 1):
        message = f'has no effect with zero = {zero}: .*\nUse "auto", or zero = 2 or 3'
        assert re.search(message, told({"replicate": 2}, zero=zero, **each) or "")
    assert re.search('zero = 2: buckets .*\nUse "step", or zero = 3', told(piped, zero=2, **each) or "")
    for schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        message = f'schedule = "{schedule}": weight gradients .*\nUse "step", or schedule = "1f1b"'
        assert re.search(message, told(piped, schedule, 2, zero=3, **each) or "")
    unequal = told(piped, "interleaved_1f1b", 2, (5, 3), zero=3, **each)
    message = r"chunks_per_rank = 2 with unequal shares, per_step = \[5, 3\].*in different orders"
    assert re.search(message, unequal or "")
    for zero, mesh in ((2, {"shard": 2}), (3, {"shard": 2}), (3, piped), (3, {**piped, "replicate": 2})):
        assert told(mesh, zero=zero, **each) is None
    assert told(piped, "interleaved_1f1b", 2, zero=3, **each) is None
    assert told(piped, shares=(5, 3), zero=3, **each) is None
    assert told(piped, "zbv", 2, zero=3, reduce_every="step") is None
    plan = plan_of({"replicate": 2}, per_step=32, data_parallel=DataParallelPlan(zero=1, reduce_every="microbatch"))
    with pytest.raises(PlanError, match='plan.data_parallel.reduce_every = "microbatch" has no effect with zero = 1'):
        check_plan(*case(plan), 2)


def test_how_often_a_step_reduces() -> None:
    for zero, pipeline, every, rounds in (
        (1, 1, "auto", 1), (2, 1, "auto", 3), (3, 1, "auto", 3), (2, 1, "step", 1), (3, 1, "step", 1),
        (3, 2, "auto", 1), (2, 2, "auto", 1), (3, 2, "microbatch", 3),
    ):  # fmt: skip
        data = DataParallelPlan(zero=zero, reduce_every=every)  # pyright: ignore[reportArgumentType]
        plan = plan_of({"shard": 2, "pipeline": pipeline}, per_step=(5, 3), data_parallel=data)
        assert reduction_rounds(plan) == rounds, plan


def test_plans_that_are_only_predictable_say_so() -> None:
    plan = plan_of(
        {"context": 2, "expert": 2},
        memory=MemoryPlan(offload="activations"),
        compute=ComputePlan(compile=True),
        data_parallel=DataParallelPlan(compression="fp8", algorithm="tree:0-32K;direct:32K-8M;ring:8M-max"),
    )
    assert len(runnability(plan)) == 3  # a list of algorithms cannot be joined with compression either
    assert plan.is_predictable
    message = 'plan.data_parallel.compression = "fp8" can be predicted but not run yet'
    with pytest.raises(PlanError, match=re.escape(message)):
        check_runnable(plan)


def test_an_example_plan_of_the_documents_fits() -> None:
    check_plan(*case(parse_plan(PLAN), SMALL), 4)
