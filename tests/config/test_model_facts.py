"""What is known of a model without building it, against the model as built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from noun_examples import recipe_of

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
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.description import facts_of, profile_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama", **GROUPED, "tie_word_embeddings": False},
    {"model_type": "llama", **GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "qwen2", **GROUPED, "tie_word_embeddings": True},
    {"model_type": "qwen3", **GROUPED, "tie_word_embeddings": False},
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 32,
        "vocab_size": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    {"model_type": "bert", **SIZES, "architectures": ["BertForMaskedLM"]},
]
SHAPES: list[ReferenceShape] = [
    DecoderShape(num_layers=3, hidden_size=64, num_heads=8, num_kv_heads=4),
    DecoderShape(num_layers=3, hidden_size=64, num_heads=8, ffn_size=96, tie_embeddings=False),
    EncoderShape(num_layers=3, hidden_size=64, num_heads=8),
    EncoderShape(num_layers=3, hidden_size=64, num_heads=8, tie_embeddings=False),
    MlpShape(num_layers=3, input_size=64, hidden_size=32, num_classes=10),
    ConvNetShape(num_layers=3, channels=8, norm="batch"),
    ConvNetShape(num_layers=3, channels=8, norm="group"),
]


def compare(recipe: Recipe) -> None:
    blueprint: Blueprint = build_model(recipe)
    facts = facts_of(recipe)
    assert facts.num_parameters == sum(parameter.numel() for parameter in blueprint.module.parameters())
    assert facts.divisible == dict(blueprint.divisible)
    assert facts.vocabulary_size == blueprint.vocabulary_size
    assert facts.sequence_length == blueprint.sequence_length
    assert blueprint.cut is not None
    assert facts.num_blocks == len(blueprint.cut.blocks)
    block = blueprint.module.get_submodule(blueprint.cut.blocks[0])
    profile = profile_of(recipe)
    assert profile is not None
    assert profile.blocks[0].parameters == sum(parameter.numel() for parameter in block.parameters())
    norms = [module for module in blueprint.module.modules() if "BatchNorm" in type(module).__name__]
    assert facts.has_batch_norm == bool(norms)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_models(shape: ReferenceShape) -> None:
    compare(recipe_of(shape))


def hf_recipe(path: Path, sequence_length: int | None = None) -> Recipe:
    model = ModelRecipe(hf=str(path), sequence_length=sequence_length)
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1))


@pytest.mark.parametrize("config", FAMILIES, ids=[str(config["model_type"]) for config in FAMILIES])
def test_hugging_face_families(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    compare(hf_recipe(tmp_path))
    assert facts_of(hf_recipe(tmp_path, 16)).sequence_length == 16


def test_configurations_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=re.escape(f"there is no file {tmp_path / 'config.json'}. Give a local folder")
    ):
        facts_of(hf_recipe(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"config.json is not readable as JSON"):
        facts_of(hf_recipe(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RecipeError, match="its config.json, of a llama, has no num_attention_heads."):
        facts_of(hf_recipe(tmp_path))


def test_of_strange_models_little_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vocab_size": 7}')
    facts = facts_of(hf_recipe(tmp_path))
    assert (facts.name, facts.vocabulary_size, facts.num_blocks, facts.divisible) == ("mamba", 7, None, None)
    model = ModelRecipe(factory="a.b:c", sequence_length=9)
    recipe = Recipe(model=model, batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1))
    assert facts_of(recipe).num_parameters is None
    assert facts_of(recipe).sequence_length == 9
    assert not recipe.is_predictable
    assert recipe.is_runnable
