"""Which models share a sequence: what is planned, listed by the search and built says the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.blueprint import build_blueprint
from weft.analysis.describe import describe
from weft.analysis.facts import facts_of_blueprint
from weft.config.cluster import parse_cluster_spec
from weft.config.plan import ComputePlan, ContextParallelPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import BatchRecipe, DecoderShape, EncoderShape, ModelRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.model.build import build_model
from weft.model.description import description_of_sizes, facts_of, profile_of
from weft.model.families import OWN_CHECKPOINTS, UNKNOWN_ATTENTION, FoundCut
from weft.model.losses import token_loss
from weft.model.profile.known import known_model
from weft.planning.price import check_layout
from weft.planning.search import recipe_space
from weft.techniques.check import check_plan
from weft.techniques.context.attention import AttentionModule, wrap_attention
from weft.techniques.context.form import AttentionForm
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.cost_terms import Layout
from weft.techniques.registry import check_no_loop
from weft.verify.numerics import shrink_case

SHAPE = DecoderShape(num_layers=2, hidden_size=32, num_heads=8, num_kv_heads=4, vocabulary_size=32, sequence_length=64)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (LLAMA, ""),
    "dynamic": (LLAMA | {"rope_parameters": ROPE}, "rotary frequencies follow the largest position"),
    "checkpoints": (LLAMA | {"gradient_checkpointing": True}, OWN_CHECKPOINTS),
    "windows": (LLAMA | {"model_type": "mistral", "sliding_window": 8}, ""),
    "bert": (BERT, ""),
}


def recipe_of(model: ModelRecipe) -> Recipe:
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


def decoder(**changes: Any) -> Recipe:
    return recipe_of(ModelRecipe(reference="decoder", shape=replace(SHAPE, **changes)))


def of_config(config: dict[str, Any], folder: Path) -> Recipe:
    (folder / "config.json").write_text(json.dumps(config))
    return recipe_of(ModelRecipe(hf=str(folder), sequence_length=64))


def plan_of(scheme: str = "ring", sequence: bool = False, **mesh: int) -> Plan:
    return Plan(
        mesh=MeshPlan(**mesh),
        context_parallel=ContextParallelPlan(scheme=scheme),  # type: ignore[arg-type]
        tensor_parallel=TensorParallelPlan(sequence=sequence),
        microbatch=MicrobatchPlan(size=4),
    )


def listed(recipe: Recipe, given: Plan | None = None) -> tuple[int, ...]:
    """Context ranks that the search considers on eight processes."""
    profile = profile_of(recipe)
    assert profile is not None
    cluster = parse_cluster_spec("8xcpu")
    return recipe_space(recipe, profile, facts_of(recipe), cluster, given or Plan()).contexts


def test_compiled_blocks_share_a_sequence_too() -> None:
    compiled = replace(plan_of(context=2), compute=ComputePlan(compile=True))
    check_plan(compiled, decoder(), facts_of(decoder()))
    assert listed(decoder(), Plan(compute=ComputePlan(compile=True))) == (1, 2, 4, 8)


def test_a_loop_of_ones_own_shares_no_sequence() -> None:
    with pytest.raises(PlanError, match="a sum over tokens, and labels that it shifts itself, or a padding mask"):
        check_no_loop(plan_of(context=2))


def mean_of_samples(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    total, count = token_loss(outputs, batch)
    return total / count, count / count


def test_a_loss_of_ones_own_shares_no_sequence() -> None:
    own = decoder()
    assert listed(own) == (1, 2, 4, 8)
    own = replace(own, model=replace(own.model, loss=f"{__name__}:{mean_of_samples.__name__}"))
    assert listed(own) == (1,)
    with pytest.raises(PlanError, match="cannot be had with model.loss"):
        check_plan(plan_of(context=2), own, facts_of(own))
    check_plan(plan_of(context=2), decoder(), facts_of(decoder()))
    blueprint = build_model(decoder())
    assert blueprint.why_not("context") == ""
    assert "its loss is a sum over tokens" in replace(blueprint, loss=mean_of_samples).why_not("context")


@pytest.mark.parametrize(
    ("length", "sequence", "fits"), [(7, False, False), (8, False, True), (15, True, False), (16, True, True)]
)
def test_every_rank_has_two_runs(length: int, sequence: bool, fits: bool) -> None:
    recipe, plan = decoder(sequence_length=length), plan_of(sequence=sequence, context=4, tensor=2)
    layout = Layout(context=4, tensor=2, sequence_parallel=sequence)
    profile = profile_of(recipe)
    assert profile is not None
    problems = check_layout(profile, parse_cluster_spec("8xcpu"), layout)
    assert any("two runs for each of 4 ranks" in problem for problem in problems) is not fits
    if fits:
        check_plan(plan, recipe, facts_of(recipe))
        return
    with pytest.raises(PlanError, match="two runs for each of 4 ranks"):
        check_plan(plan, recipe, facts_of(recipe))


class Attending(nn.Module):
    def forward(self, hidden: Tensor, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=is_causal)


@pytest.mark.parametrize("held", [1, 2])
def test_a_model_is_as_causal_as_it_says(held: int) -> None:
    """`transformers` leaves out that a call about one token is causal."""
    context, seen = StepContext(), list[bool]()

    def attend(query: Tensor, key: Tensor, value: Tensor, tokens: LocalTokens, form: AttentionForm) -> Tensor:
        seen.append(form.pattern.causal)
        return value

    run = wrap_attention(Attending().forward, AttentionModule("attention", attend, is_causal=True), context)
    tokens = LocalTokens(length=8, runs=((0, held),))
    state = MicrobatchState(step=0, seed=0, sample_ids=torch.arange(1), sequence_length=None, tokens=tokens)
    with context.entered(state):
        run(torch.ones(1, 1, held, 4), True)
        if held == 1:
            run(torch.ones(1, 1, held, 4), False)
        else:
            with pytest.raises(PlanError, match="sees every token, where attention of this model sees no later token"):
                run(torch.ones(1, 1, held, 4), False)
    assert seen == [True] * (3 - held)


def test_a_blueprint_must_say_how_its_tokens_see_one_another() -> None:
    recipe, blueprint = decoder(), build_model(decoder())
    assert blueprint.why_not("context") == ""
    for silent in (replace(blueprint, attention=None), replace(blueprint, position_input=None)):
        assert describe(silent).facts.why_not("context") == UNKNOWN_ATTENTION
        facts = facts_of_blueprint(silent, recipe)
        assert facts.why_not("context") == UNKNOWN_ATTENTION
        with pytest.raises(PlanError, match="cannot be had for this model"):
            check_plan(plan_of(context=2), recipe, facts)


def test_no_stage_of_a_cut_that_was_found_shares_a_sequence() -> None:
    recipe = decoder()
    cut = FoundCut(stem=(), blocks=("blocks.0", "blocks.1"), between={}, tail=(), crossings=())
    blueprint = replace(build_model(recipe), cut=cut)
    facts, profile = facts_of_blueprint(blueprint, recipe), describe(blueprint)
    check_plan(plan_of(context=2), recipe, facts)
    with pytest.raises(PlanError, match="cannot join mesh.pipeline > 1 for this model"):
        check_plan(plan_of(context=2, pipeline=2), recipe, facts)
    space = recipe_space(recipe, profile, facts, parse_cluster_spec("8xcpu"), Plan())
    assert max(space.contexts) > 1
    assert max(space.pipelines) > 1
    assert not space.shares_within_stages


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_configuration_tells_is_what_the_model_shows(name: str, tmp_path: Path) -> None:
    config, why = CONFIGS[name]
    recipe = of_config(config, tmp_path)
    agree(recipe, build_blueprint(recipe), why)


@pytest.mark.parametrize("shape", [SHAPE, EncoderShape(num_layers=2, hidden_size=32, num_heads=4, vocabulary_size=32)])
def test_a_reference_model_is_what_its_shape_tells(shape: DecoderShape | EncoderShape) -> None:
    kind = "decoder" if isinstance(shape, DecoderShape) else "encoder"
    recipe = recipe_of(ModelRecipe(reference=kind, shape=shape))
    agree(recipe, build_model(recipe), "")


def agree(recipe: Recipe, blueprint: Blueprint, why: str) -> None:
    planned, built = facts_of(recipe), facts_of_blueprint(blueprint, recipe)
    assert planned.attention_heads == built.attention_heads
    assert bool(planned.why_not("context")) == bool(built.why_not("context")) == bool(why)
    assert why in planned.why_not("context")
    assert (listed(recipe) == (1,)) is bool(why)
    if planned.attention_heads is not None and not why:
        with pytest.raises(PlanError, match="no equal shares of"):
            check_plan(plan_of("ulysses", context=5), recipe, built)


def test_a_model_that_predicts_no_tokens_is_known_by_its_architecture(tmp_path: Path) -> None:
    recipe = of_config(LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, tmp_path)
    assert "a LlamaForSequenceClassification predicts no token" in facts_of(recipe).why_not("context")


@pytest.mark.parametrize(("scheme", "processes"), [("ulysses", None), ("ulysses", 16), ("ring", 32)])
def test_a_small_model_fits_the_plan_that_it_checks(scheme: str, processes: int | None, tmp_path: Path) -> None:
    whole = decoder(hidden_size=4096, num_heads=32, num_kv_heads=8, vocabulary_size=32_000, sequence_length=4096)
    plan = plan_of(scheme, context=16, tensor=2, sequence=True)
    check_plan(plan, whole, facts_of(whole))
    small = shrink_case(whole, plan, facts_of(whole), processes=processes, folder=tmp_path, memory_bytes=10**9)
    check_plan(small.plan, small.recipe, facts_of(small.recipe))
    length = facts_of(small.recipe).sequence_length
    assert length is not None
    assert length % 2 == 1
    assert length > 4 * small.plan.mesh.context


def test_known_models_of_other_systems_may_share_a_sequence() -> None:
    assert description_of_sizes(known_model("llama-3.1-8b").sizes).facts.why_not("context") == ""
