"""The simple choice of a plan, its reasons, and how it is shown."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noun_examples import SMALL, recipe_of

from weft.cluster import Cluster, Devices, Node, parse_cluster_spec
from weft.errors import PlanError
from weft.plan import (
    ComputePlan,
    DataParallelPlan,
    MeshPlan,
    MicrobatchPlan,
    ModelFacts,
    Plan,
    check_plan,
    describe_plan,
    dump_plan,
    even_shares,
    facts_of,
    parse_plan,
    split_batch,
)
from weft.recipe import BatchRecipe, ConvNetShape, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.search import auto_plan, estimate_memory

LLAMA_7B = DecoderShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    ffn_size=11_008,
    vocabulary_size=32_000,
    sequence_length=4096,
    tie_embeddings=False,
)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 64))
def test_the_batch_is_kept_exactly(batch: int, ranks: int, largest: int) -> None:
    microbatch = split_batch(batch, ranks, largest)
    if ranks > batch:
        assert microbatch is None
        return
    assert microbatch is not None
    shares = microbatch.shares(ranks)
    assert len(shares) == ranks
    assert min(shares) >= 1
    assert microbatch.size * sum(shares) == batch
    assert microbatch.size <= largest
    assert microbatch.size * max(shares) == -(-batch // ranks)  # the busiest rank has no sample too many


def test_shares_as_when_a_host_is_lost() -> None:
    assert even_shares(32, 3) == (11, 11, 10)
    assert split_batch(64, 3, 2) == MicrobatchPlan(size=2, per_step=(11, 11, 10))


def choose_with_advice(
    recipe: Recipe, cluster: Cluster, facts: ModelFacts, processes: int
) -> tuple[Plan, dict[str, str]]:
    """Choose a plan, with the number of processes that the refusal of another number advises."""
    try:
        plan, reasons = auto_plan(recipe, cluster, facts, processes)
    except PlanError as refusal:
        advised = re.search(r"Use processes = (\d+)\.$", str(refusal))
        if advised is None or int(advised[1]) >= processes:
            raise
        processes = int(advised[1])
        plan, reasons = auto_plan(recipe, cluster, facts, processes)
    assert plan.mesh.world_size == processes
    return plan, reasons


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 100), st.integers(1, 12), st.sampled_from(["decoder", "batch", "group", "factory", "whole"]))
def test_what_is_chosen_passes_the_check(batch: int, processes: int, kind: str) -> None:
    shape = ConvNetShape(num_layers=3, channels=8, norm="batch" if kind == "batch" else "group")
    recipe = recipe_of(SMALL if kind == "decoder" else shape, batch)
    facts = ModelFacts(per_sample_loss=kind != "whole") if kind in ("factory", "whole") else facts_of(recipe)
    cluster = parse_cluster_spec("2x8xh100")
    plan, reasons = choose_with_advice(recipe, cluster, facts, processes)
    check_plan(plan, recipe, facts)
    assert plan.is_runnable
    assert parse_plan(dump_plan(plan, reasons)) == plan
    anything, _ = auto_plan(recipe, cluster, facts)
    assert anything.mesh.world_size <= 16


def test_data_ranks_come_first_and_every_core_is_used() -> None:
    cluster = Cluster(
        nodes=(Node(cores=8, memory_bytes=2 * 10**10, devices=Devices(kind="cpu", count=8, memory_bytes=10**9)),)
    )
    plan, reasons = auto_plan(recipe_of(), cluster, facts_of(recipe_of()), 2)
    assert plan.mesh == MeshPlan(replicate=2)
    assert plan.compute.threads_per_rank == 4
    assert reasons["compute.threads_per_rank"] == "8 cores over 2 processes"
    assert reasons["microbatch.per_step"] == "8 × 4 × 2 data ranks = the recipe's 64"
    assert reasons["mesh.replicate"].startswith("the largest data-parallel split of 2 processes that fits; about")


def llama(batch: int = 64) -> Recipe:
    permit = PermitRecipe(precision=("fp32", "bf16"))
    return Recipe(
        model=ModelRecipe(shape=LLAMA_7B),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=1),
        permit=permit,
    )


def test_what_does_not_fit_is_sharded_then_recomputed_then_cut() -> None:
    facts = facts_of(llama())
    assert facts.num_parameters == 6_738_415_616  # Llama 2 7B
    plan, reasons = auto_plan(llama(), parse_cluster_spec("8xa100-40gb"), facts)
    assert plan.compute.precision == "bf16"
    assert plan.data_parallel.zero == 3
    assert plan.mesh.shard == 8
    assert reasons["data_parallel.zero"] == "weights, gradients and optimizer would not fit on every process"
    plan, _ = auto_plan(llama(batch=2), parse_cluster_spec("8xa100-40gb"), facts, 8)
    assert plan.mesh.data == 2
    assert plan.mesh.tensor * plan.mesh.pipeline == 4


def test_what_fits_nowhere_says_how_much_is_missing() -> None:
    message = r"No plan fits: a decoder of 6,738,415,616 parameters needs at least .* GiB .*: states .*\nUse about"
    with pytest.raises(PlanError, match=message):
        auto_plan(llama(), parse_cluster_spec("8xcpu"), facts_of(llama()))
    with pytest.raises(PlanError, match="processes = 0 is too few. Use 1 or more."):
        auto_plan(llama(), parse_cluster_spec("8xcpu"), facts_of(llama()), 0)


def test_model_states_follow_the_usual_counts() -> None:
    """16Ψ, 4Ψ+12Ψ/N, 2Ψ+14Ψ/N, 16Ψ/N with gradients kept in bf16, as the paper counts."""
    facts = facts_of(llama())
    parameters = facts.num_parameters or 0
    for zero, wanted in ((0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        plan = Plan(
            mesh=MeshPlan(shard=8),
            data_parallel=DataParallelPlan(zero=zero, reduce_precision="compute"),  # pyright: ignore[reportArgumentType]
            compute=ComputePlan(precision="bf16"),
            microbatch=MicrobatchPlan(per_step=8),
        )
        need = estimate_memory(plan, llama(), facts, on_accelerator=True)
        assert need is not None
        assert need.states_bytes == pytest.approx(wanted * parameters)


def test_a_plan_is_shown_with_reasons_or_origins() -> None:
    recipe, cluster = recipe_of(), parse_cluster_spec("2xcpu")
    plan = parse_plan("[mesh]\npipeline = 2\ntensor = 2\nreplicate = 2\n[microbatch]\nsize = 4\nper_step = 8\n")
    first, *more = describe_plan(plan, {"mesh.tensor": "fast links"}, facts_of(recipe), cluster)
    assert first == (
        "plan      data 2 × tensor 2 × pipeline 2 = 8 processes on 2 cores  ·  "
        "1F1B  ·  ZeRO-1  ·  fp32  ·  39.6 M parameters"
    )
    assert more == [
        "          mesh.pipeline = 2         from plan.toml, line 2",
        "          mesh.replicate = 2        from plan.toml, line 4",
        "          mesh.tensor = 2           fast links",
        "          microbatch.size = 4       from plan.toml, line 6",
        "          microbatch.per_step = 8   from plan.toml, line 7",
    ]
    assert describe_plan(Plan(), {}, ModelFacts()) == ["plan      1 process  ·  fp32"]
    on_devices = describe_plan(Plan(mesh=MeshPlan(replicate=2)), {}, ModelFacts(), parse_cluster_spec("2x8xh100"))
    assert on_devices[0] == "plan      data 2 = 2 processes on 16 h100  ·  ZeRO-1  ·  fp32"
