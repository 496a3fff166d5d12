"""Profiles against what is known of the models they describe, and against published formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    ReferenceShape,
    RunRecipe,
)
from weft.errors import RecipeError
from weft.model.description import description_of, facts_of, profile_of
from weft.model.profile import Block, ModelSizes, profile_of_sizes
from weft.model.profile.known import known_model

SHAPES: list[ReferenceShape] = [
    DecoderShape(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=4, dropout=0.1),
    DecoderShape(num_layers=3, hidden_size=64, num_heads=8, ffn_size=96, tie_embeddings=False),
    EncoderShape(num_layers=3, hidden_size=64, num_heads=8),
    EncoderShape(num_layers=3, hidden_size=64, num_heads=8, tie_embeddings=False),
    MlpShape(num_layers=3, input_size=64, hidden_size=32, num_classes=10),
    ConvNetShape(num_layers=3, channels=8, norm="batch"),
    ConvNetShape(num_layers=3, channels=8, norm="group"),
]
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", **BASE, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", **BASE, "sliding_window": 16},
    {"model_type": "qwen2", **BASE, "tie_word_embeddings": True},
    {"model_type": "qwen3", **BASE},
    {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 128},
    {"model_type": "bert", **BASE},
]


def recipe_of(model: ModelRecipe) -> Recipe:
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1))


def agrees_with_facts(recipe: Recipe) -> None:
    """The facts themselves are compared with models as built in tests/config."""
    facts = facts_of(recipe)
    profile = profile_of(recipe)
    assert profile is not None
    assert profile.num_parameters == facts.num_parameters
    assert len(profile.blocks) == facts.num_blocks
    assert dict(profile.divisible) == facts.divisible
    assert profile.hidden_size == facts.hidden_size
    assert profile.vocabulary_size == (facts.vocabulary_size or 0)
    assert profile.sequence_length == (facts.sequence_length or 1)
    assert profile.tied == facts.tied
    assert profile.facts == facts
    assert profile.name == facts.name


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_models(shape: ReferenceShape) -> None:
    agrees_with_facts(recipe_of(ModelRecipe(shape=shape)))


@pytest.mark.parametrize("config", CONFIGS, ids=[str(config["model_type"]) for config in CONFIGS])
def test_hugging_face_configurations(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    agrees_with_facts(recipe_of(ModelRecipe(hf=str(tmp_path))))


def test_factories_have_no_profile(tmp_path: Path) -> None:
    recipe = recipe_of(ModelRecipe(factory="a.b:c"))
    assert profile_of(recipe) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 7}')
    recipe = recipe_of(ModelRecipe(hf=str(tmp_path)))
    assert profile_of(recipe) is None
    assert description_of(recipe) is None


def kept(block: Block, tensor: int = 1, *, sequence: bool = False, bytes_each: int = 2) -> float:
    """Bytes per token of one rank."""
    total = 0.0
    for operator in block.operators:
        whole = operator.split == "replicate" or (operator.split == "sequence" and not sequence)
        bytes_kept = bytes_each * operator.kept_elements_per_token + operator.kept_bytes_per_token
        total += bytes_kept / (1 if whole else tensor)
    return total


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_gpt_are_those_of_korthikanti(tensor: int) -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, equations 2 and 4, without the scores: 34 and 10 + 24/t bytes per
    feature; statistics, which they leave out, aside."""
    block = profile_of_sizes(known_model("gpt3-175b").sizes).blocks[0]
    hidden = 12288
    assert kept(block, tensor) == pytest.approx(hidden * (10 + 24 / tensor), rel=0.003)
    assert kept(block, tensor, sequence=True) == pytest.approx(hidden * 34 / tensor, rel=0.003)


def test_activations_of_a_gated_block() -> None:
    sizes = known_model("llama-2-7b").sizes
    block = profile_of_sizes(sizes).blocks[0]
    assert kept(block) == pytest.approx(16 * sizes.hidden_size + 6 * sizes.ffn_size, rel=0.003)


def test_windows_alternate() -> None:
    blocks = profile_of_sizes(known_model("gpt-oss-20b").sizes).blocks
    windows = [next(o.window for o in block.operators if o.kind == "attention") for block in blocks]
    assert windows == [128, None] * 12
    assert blocks[0] is blocks[2]


def test_another_length_leaves_the_tables() -> None:
    sizes = known_model("gpt2").sizes
    assert profile_of_sizes(sizes, 128).num_parameters == profile_of_sizes(sizes).num_parameters
    assert profile_of_sizes(sizes, 128).sequence_length == 128


SIZES = ModelSizes(num_layers=4, hidden_size=64, num_heads=4, sequence_length=16, vocabulary_size=100, ffn_size=128)


@given(
    layers=st.integers(1, 6),
    kv_heads=st.sampled_from([1, 2, 4]),
    experts=st.sampled_from([0, 4]),
    dense=st.integers(0, 3),
    every=st.integers(1, 3),
    tied=st.booleans(),
)
def test_blocks_add_up(layers: int, kv_heads: int, experts: int, dense: int, every: int, tied: bool) -> None:
    sizes = replace(SIZES, num_layers=layers, num_kv_heads=kv_heads, tied=tied, expert_ffn_size=32)
    sizes = replace(sizes, num_experts=experts, leading_dense_layers=dense, expert_every=every)
    profile = profile_of_sizes(sizes)
    mixtures = sum(sizes.is_mixture(layer) for layer in range(layers))
    attention = 64 * (64 + 2 * kv_heads * 16) + 64 * 64 + 2 * 64
    blocks = layers * attention + (layers - mixtures) * 3 * 64 * 128 + mixtures * (3 * 64 * 32 + 64) * experts
    assert profile.num_parameters == blocks + 64 + 100 * 64 * (1 if tied else 2)
    assert len({id(block) for block in profile.blocks}) <= 2
    for block in profile.blocks:
        names = [operator.name for operator in block.operators]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads = 5 does not divide hidden_size = 64"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_experts": 8}, "expert_ffn_size = 0 is missing"),
        ({"num_experts": 2, "top_k": 3, "expert_ffn_size": 8}, "top_k = 3 is more than num_experts = 2"),
        ({"ffn_size": 0}, "ffn_size = 0 is missing"),
        ({"vocabulary_size": 0}, "vocabulary_size = 0 is missing"),
        ({"head": "classes"}, "num_classes = 0 is missing"),
    ],
)
def test_sizes_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        replace(SIZES, **changes)
