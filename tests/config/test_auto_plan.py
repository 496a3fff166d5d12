"""The simple choice of a plan, its reasons, and how it is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noun_examples import SMALL, recipe_of

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import MeshPlan, MicrobatchPlan, ModelFacts, Plan, dump_plan, even_shares, parse_plan, split_batch
from weft.config.recipe import BatchRecipe, ConvNetShape, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.search import PlanChoice, choose_plan
from weft.techniques.check import check_plan, runnability
from weft.techniques.describe import describe_plan

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


def chosen(recipe: Recipe, cluster: Cluster, processes: int | None = None, **facts: Any) -> PlanChoice:
    profile = profile_of(recipe)
    assert profile is not None
    return choose_plan(
        recipe,
        cluster,
        replace(facts_of(recipe), **facts),
        processes,
        profile=replace(profile, **{name: value for name, value in facts.items() if hasattr(profile, name)}),
    )


def choose_with_advice(recipe: Recipe, cluster: Cluster, processes: int, **facts: Any) -> PlanChoice:
    """Choose a plan, with the number of processes that the refusal of another number advises."""
    try:
        choice = chosen(recipe, cluster, processes, **facts)
    except PlanError as refusal:
        advised = re.search(r"Use processes = (\d+)\.$", str(refusal))
        if advised is None or int(advised[1]) >= processes:
            raise
        processes = int(advised[1])
        choice = chosen(recipe, cluster, processes, **facts)
    assert choice.plan.mesh.world_size == processes
    return choice


@settings(deadline=None, max_examples=5)  # each searches plans for two machines of eight
@given(st.integers(1, 100), st.integers(1, 12), st.sampled_from(["decoder", "batch", "group", "whole"]))
def test_what_is_chosen_passes_the_check(batch: int, processes: int, kind: str) -> None:
    shape = ConvNetShape(num_layers=3, channels=8, norm="batch" if kind == "batch" else "group")
    recipe = recipe_of(SMALL if kind == "decoder" else shape, batch)
    whole = {"per_sample_loss": False} if kind == "whole" else {}
    cluster = parse_cluster_spec("2x8xh100")
    choice = choose_with_advice(recipe, cluster, processes, **whole)
    check_plan(choice.plan, recipe, replace(facts_of(recipe), **whole))
    assert not runnability(choice.plan)
    assert parse_plan(dump_plan(choice.plan, choice.reasons)) == choice.plan
    assert chosen(recipe, cluster, **whole).plan.mesh.world_size <= 16


def llama(batch: int = 64) -> Recipe:
    permit = PermitRecipe(precision=("fp32", "bf16"))
    return Recipe(
        model=ModelRecipe(shape=LLAMA_7B),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=1),
        permit=permit,
    )


def test_what_does_not_fit_is_cut() -> None:
    facts = facts_of(llama())
    assert facts.num_parameters == 6_738_415_616  # Llama 2 7B
    choice = chosen(llama(), parse_cluster_spec("8xa100-40gb"))
    assert choice.plan.compute.precision == "bf16"
    assert all(rival.prediction.fits for rival in choice.rivals)
    choice = chosen(llama(batch=2), parse_cluster_spec("8xa100-40gb"), 8)
    assert choice.plan.mesh.data <= 2
    assert choice.plan.mesh.tensor * choice.plan.mesh.context * choice.plan.mesh.pipeline >= 4


def test_what_fits_nowhere_says_how_much_is_missing() -> None:
    cluster = parse_cluster_spec("1xa100-40gb")
    message = (
        r"No plan fits: a decoder of 6,738,415,616 parameters needs about (\S+) GiB per process"
        r" .*: states .* 3\d\S* GiB can be used.\nUse about (\d+) devices of this size, or a smaller model."
    )
    with pytest.raises(PlanError, match=message) as refusal:
        chosen(llama(), cluster)
    found = re.search(message, str(refusal.value))
    assert found is not None
    # What it says is needed is enough, and hardly less is not.
    for share, is_enough in ((1.02, True), (0.93, False)):
        devices = replace(cluster.nodes[0].devices, memory_bytes=int(share * float(found[1]) * 2**30 / 0.94))
        other = replace(cluster, nodes=(replace(cluster.nodes[0], devices=devices),))
        if is_enough:
            assert chosen(llama(), other).rivals
        else:
            with pytest.raises(PlanError, match="No plan fits"):
                chosen(llama(), other)
    with pytest.raises(PlanError, match="processes = 0 is too few. Use 1 or more."):
        chosen(llama(), cluster, 0)


def test_settings_that_leave_nothing_are_named() -> None:
    given = Plan(mesh=MeshPlan(replicate=3), origins={"mesh.replicate": "--set"})
    recipe = recipe_of(SMALL, 2)
    profile = profile_of(recipe)
    assert profile is not None
    message = re.escape("has all of plan.mesh.replicate as they were given, with global_batch_size = 2. Leave one")
    with pytest.raises(PlanError, match=message):
        choose_plan(recipe, parse_cluster_spec("8xh100"), facts_of(recipe), profile=profile, pins=given)


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
