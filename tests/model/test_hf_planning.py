"""What cannot be cut or split is not in the space of the search: no plan is proposed that training would refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api import describe_recipe as describe_by_building
from weft.cli._read import describe_recipe
from weft.config.cluster import resolve_cluster
from weft.config.plan import ModelFacts, Plan, apply_overrides
from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.errors import PlanError, RecipeError
from weft.model.description import facts_of
from weft.planning.search import choose_plan, recipe_space, search
from weft.techniques.check import check_plan

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "olmo2": transformers.Olmo2Config,
    "mixtral": transformers.MixtralConfig,
}


def drawn_recipe(folder: Path, family: str, seed: int) -> Recipe:
    """A small model of a family with sizes, windows and a batch drawn from a seed."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice((2, 4, 6, 8))
    sizes: dict[str, Any] = {
        "hidden_size": 8 * heads,
        "intermediate_size": 16 * draw.randint(2, 5),
        "num_hidden_layers": draw.randint(1, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, heads) if heads % n == 0]),
        "vocab_size": draw.choice((96, 128, 250)),
        "max_position_embeddings": 64,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family == "mistral":
        sizes["sliding_window"] = draw.choice((None, 16))
    if family in ("qwen2", "qwen3"):
        sizes |= {"use_sliding_window": draw.choice((False, True)), "sliding_window": 16, "max_window_layers": 1}
    FAMILIES[family](**sizes).save_pretrained(folder)
    return Recipe(
        model=ModelRecipe(hf=str(folder), sequence_length=32),
        batch=BatchRecipe(global_batch_size=draw.choice((4, 6, 8))),
        run=RunRecipe(steps=2),
        permit=PermitRecipe(precision=("fp32", "bf16")),
    )


def built_facts(recipe: Recipe) -> ModelFacts:
    return facts_of_blueprint(build_blueprint(recipe), recipe)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_search_proposes_training_accepts(family: str, seed: int, tmp_path: Path) -> None:
    recipe = drawn_recipe(tmp_path, family, seed)
    profile, built = describe_by_building(recipe).profile, built_facts(recipe)
    described = describe_recipe(recipe)
    assert profile is not None
    assert described.profile is not None
    # What is read off the configuration and what the built model says are the same.
    assert bool(described.facts.why_not("blocks")) == bool(built.why_not("blocks"))
    assert dict(described.facts.divisible or {}) == dict(built.divisible or {})
    cluster = resolve_cluster(random.Random(f"{family} {seed}").choice(("8xh100", "2x4xa100-40gb", "4x8xh100")))
    space = recipe_space(recipe, described.profile, described.facts, cluster, Plan())
    result = search(
        described.profile,
        cluster,
        global_batch_size=recipe.batch.global_batch_size,
        space=space,
        permit=recipe.permit,
        top=20,
    )
    assert result.best
    for candidate in result.best:
        assert candidate.plan is not None
        check_plan(candidate.plan, recipe, built)
    for processes in (1, 2, 4):
        choice = choose_plan(recipe, cluster, described.facts, processes, profile=described.profile)
        assert choice.rivals, "a space that holds only what runs loses no rival to a filter"
        check_plan(choice.plan, recipe, built, processes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("setting", ["mesh.pipeline=2", "mesh.tensor=2", "memory.recompute=full"])
def test_a_given_setting_is_kept_or_refused_with_its_reason(family: str, setting: str, tmp_path: Path) -> None:
    recipe = drawn_recipe(tmp_path, family, seed=1)
    recipe, given = apply_overrides(recipe, Plan(), [f"plan.{setting}"])
    described, cluster = describe_recipe(recipe), resolve_cluster("8xh100")
    assert described.profile is not None
    key = setting.partition("=")[0]
    facts = described.facts
    sizes = facts.divisible or {}
    refused = (
        not sizes or any(size % 2 for size in sizes.values()) if key == "mesh.tensor" else bool(facts.why_not("blocks"))
    )
    refused |= key == "mesh.pipeline" and (facts.num_blocks or 1) < 2
    if refused:
        with pytest.raises(PlanError, match=f"plan.{key} = ") as caught:
            recipe_space(recipe, described.profile, facts, cluster, given)
        if key != "mesh.tensor" and facts.why_not("blocks"):
            assert facts.why_not("blocks") in str(caught.value)
        return
    space = recipe_space(recipe, described.profile, facts, cluster, given)
    result = search(described.profile, cluster, global_batch_size=recipe.batch.global_batch_size, space=space)
    assert result.best
    for candidate in result.best:
        assert candidate.plan is not None
        section, name = key.split(".")
        assert getattr(getattr(candidate.plan, section), name) == getattr(getattr(given, section), name)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}),
    "falcon": ("FalconForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "opt": ("OPTForCausalLM", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                               "word_embed_proj_dim": 64}),
}  # fmt: skip
"""Families without a table, without `max_position_embeddings`, or with attention of their own."""


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_without_a_table_gets_plans_that_training_accepts(family: str, tmp_path: Path) -> None:
    architecture, sizes = OTHERS[family]
    config = {"model_type": family, "architectures": [architecture], "vocab_size": 96, "bos_token_id": 1} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 2, "pad_token_id": 0}))
    recipe = Recipe(
        model=ModelRecipe(hf=str(tmp_path), sequence_length=32),
        batch=BatchRecipe(global_batch_size=8),
        run=RunRecipe(steps=2),
    )
    described, built = describe_recipe(recipe), built_facts(recipe)
    assert described.profile is not None
    cluster = resolve_cluster("2x4xa100-40gb")
    space = recipe_space(recipe, described.profile, described.facts, cluster, Plan())
    result = search(described.profile, cluster, global_batch_size=8, space=space, top=20)
    assert result.best
    for candidate in result.best:
        assert candidate.plan is not None
        check_plan(candidate.plan, recipe, built)


def test_a_length_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    config = {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe(model=ModelRecipe(hf=str(tmp_path)), batch=BatchRecipe(global_batch_size=8), run=RunRecipe(steps=2))
    with pytest.raises(RecipeError, match="model.sequence_length = 2048"):
        describe_recipe(recipe)


def test_defaults_of_a_family_count_where_its_configuration_is_short(tmp_path: Path) -> None:
    """A Mistral's window is 4,096 where config.json does not say so, as transformers has it."""
    recipe = drawn_recipe(tmp_path, "mistral", seed=0)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("sliding_window", None)
    path.write_text(json.dumps(config))
    built = built_facts(recipe)
    assert built.why_not("sequence") == facts_of(recipe).why_not("sequence") != ""
    assert built.why_not("blocks") == facts_of(recipe).why_not("blocks") == ""
