"""Shrinking: few blocks, narrow layers, and the structure that the plan splits still there."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    ParameterGroup,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import RecipeError
from weft.model.build import build_model
from weft.model.description import facts_of, shrink_config, shrink_shape, shrink_sizes
from weft.model.profile import ModelSizes
from weft.techniques.check import check_plan
from weft.verify.numerics import SmallCase, shrink_case

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
    "rope_theta": 500000.0,
}  # fmt: skip
PLAN = Plan(
    mesh=MeshPlan(pipeline=16, replicate=128, tensor=8),
    data_parallel=DataParallelPlan(zero=1),
    microbatch=MicrobatchPlan(size=1, per_step=16),
)


def recipe(model: ModelRecipe, batch: int = 2048, **optimizer: Any) -> Recipe:
    return Recipe(
        model=model,
        batch=BatchRecipe(global_batch_size=batch),
        optimizer=OptimizerRecipe(**optimizer),
        run=RunRecipe(steps=1000),
        permit=PermitRecipe(precision=("fp32",)),
    )


def shrunk(whole: Recipe, plan: Plan, folder: Path) -> SmallCase:
    check_plan(plan, whole, facts_of(whole))
    return shrink_case(whole, plan, facts_of(whole), processes=None, folder=folder, memory_bytes=10**9)


def test_a_decoder_of_405_billion_parameters(tmp_path: Path) -> None:
    shape = DecoderShape(
        num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, ffn_size=53248, vocabulary_size=128256,
        sequence_length=8192, tie_embeddings=False, dropout=0.1, rope_theta=5e5,
    )  # fmt: skip
    small = shrunk(recipe(ModelRecipe(shape=shape), warmup_steps=900), PLAN, tmp_path)
    results = small.recipe.model.shape
    assert isinstance(results, DecoderShape)
    assert results.num_layers == 3
    assert results.num_heads // (results.num_kv_heads or 0) == 16  # the same grouping
    assert (results.num_kv_heads, results.sequence_length) == (2, 11)  # one key-value head per rank, as with 8 over 8
    assert (results.dropout, results.tie_embeddings, results.rope_theta) == (0.1, False, 5e5)
    assert abs(results.ffn_size / results.hidden_size - 53248 / 16384) < 0.1  # type: ignore[operator]
    assert results.ffn_size // 2 % 2 == 1  # type: ignore[operator]  # an odd share for each rank
    parameters = sum(parameter.numel() for parameter in build_model(small.recipe).module.parameters())
    assert parameters < 300_000
    assert small.recipe.optimizer.warmup_steps == 2
    check_plan(small.plan, small.recipe, facts_of(small.recipe), 8)


def test_a_hugging_face_config(tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text(json.dumps(LLAMA))
    folder = tmp_path / "small"
    folder.mkdir()
    small = shrunk(recipe(ModelRecipe(hf=str(given), sequence_length=4096)), PLAN, folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (3, 32, 2)
    assert config["rope_theta"] == 500000.0
    assert config["bos_token_id"] < config["vocab_size"]
    assert json.loads(given.read_text()) == LLAMA
    check_plan(small.plan, small.recipe, facts_of(small.recipe), 8)
    assert build_model(small.recipe).cut is not None


def test_lists_with_an_entry_per_block_are_thinned_out() -> None:
    config = LLAMA | {"layer_types": ["full_attention"] * 125 + ["sliding_attention"], "other": [1, 2]}
    small = shrink_config(config, 3, 8, 2)
    assert small["layer_types"] == ["full_attention", "full_attention", "sliding_attention"]
    assert small["other"] == [1, 2]


def test_experts_become_few() -> None:
    config = LLAMA | {"num_local_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1024}
    small = shrink_config(config, 2, 1, 1)
    assert (small["num_local_experts"], small["num_experts_per_tok"]) == (4, 2)
    assert small["moe_intermediate_size"] < 64


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_experts_stay_divisible_by_the_ranks_that_share_them_out(ranks: int) -> None:
    grouped = {"n_routed_experts": 120, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 8}
    config = LLAMA | {"moe_intermediate_size": 1024, **grouped}
    small = shrink_config(config, 2, 1, 1, experts=ranks)
    assert small["n_routed_experts"] % math.lcm(ranks, small["n_group"]) == 0
    assert small["num_experts_per_tok"] < small["n_routed_experts"] <= 10
    shape = DecoderShape(num_layers=4, hidden_size=256, num_heads=4, num_experts=120, top_k=8)
    reference = shrink_shape(shape, 2, 1, 1, experts=ranks)
    assert isinstance(reference, DecoderShape)
    assert reference.num_experts % ranks == 0
    assert reference.top_k < reference.num_experts <= 8


def test_heads_wider_than_the_model_stay_so() -> None:
    small = shrink_config(LLAMA | {"model_type": "qwen3", "hidden_size": 1024, "head_dim": 128}, 2, 1, 1)
    assert small["head_dim"] * small["num_attention_heads"] != small["hidden_size"]


@pytest.mark.parametrize(
    "shape",
    [
        EncoderShape(num_layers=24, hidden_size=1024, num_heads=16, dropout=0.2),
        MlpShape(num_layers=10, input_size=784, hidden_size=512, num_classes=1000),
    ],
)
def test_other_shapes(shape: EncoderShape | MlpShape, tmp_path: Path) -> None:
    plan = Plan(mesh=MeshPlan(tensor=4, pipeline=2), microbatch=MicrobatchPlan(size=4, per_step=8))
    small = shrunk(recipe(ModelRecipe(shape=shape), 32), plan, tmp_path)
    results = small.recipe.model.shape
    assert isinstance(results, type(shape))
    assert results.hidden_size < 100
    assert results.dropout == shape.dropout
    check_plan(small.plan, small.recipe, facts_of(small.recipe), 8)


def test_batch_statistics_keep_one_microbatch(tmp_path: Path) -> None:
    plan = Plan(mesh=MeshPlan(replicate=8), microbatch=MicrobatchPlan(size=32, per_step=1))
    shape = ConvNetShape(num_layers=20, channels=64, image_size=224, image_channels=3, num_classes=1000)
    small = shrunk(recipe(ModelRecipe(shape=shape), 256), plan, tmp_path)
    assert small.plan.microbatch == MicrobatchPlan(size=5, per_step=1)
    assert small.label_range == 10
    check_plan(small.plan, small.recipe, facts_of(small.recipe))


def test_patterns_over_lost_blocks_are_left_out_and_told(tmp_path: Path) -> None:
    shape = DecoderShape(num_layers=32, hidden_size=512, num_heads=8)
    whole = recipe(
        ModelRecipe(shape=shape, freeze=("embedding*", "blocks.30.*")), groups=(ParameterGroup(match="*norm*"),)
    )
    small = shrunk(whole, replace(PLAN, mesh=MeshPlan(replicate=128)), tmp_path)
    assert small.recipe.model.freeze == ("embedding*",)
    assert len(small.recipe.optimizer.groups) == 1
    assert small.notes == ('model.freeze "blocks.30.*" matches nothing in the small model and is not checked',)


def test_a_factory_that_is_too_large_is_refused(tmp_path: Path) -> None:
    whole = recipe(ModelRecipe(factory="own.models:build"))
    facts = replace(facts_of(whole), num_parameters=10**9, num_blocks=4)
    with pytest.raises(RecipeError, match=r"makes 1,000,000,000 parameters.*smaller arguments"):
        shrink_case(whole, PLAN, facts, processes=None, folder=tmp_path, memory_bytes=10**9)


@settings(max_examples=300, deadline=None)
@given(
    per_rank=st.integers(1, 4),
    group=st.sampled_from([1, 2, 4, 8, 16]),
    head_size=st.sampled_from([32, 64, 128]),
    ratio=st.floats(1.0, 6.0),
    tensor=st.sampled_from([1, 2, 4, 8]),
    scaled=st.sampled_from([1, 2, 4]),
)
def test_widths_stay_divisible(
    per_rank: int, group: int, head_size: int, ratio: float, tensor: int, scaled: int
) -> None:
    scaled = min(scaled, tensor)
    heads = tensor * per_rank * group
    whole = ModelSizes(
        num_layers=1,
        hidden_size=heads * head_size,
        num_heads=heads,
        num_kv_heads=tensor * per_rank,
        head_size=head_size,
        ffn_size=tensor * max(1, int(heads * head_size * ratio / tensor)),
        vocabulary_size=tensor * 16_000,
        sequence_length=1,
    )
    small = shrink_sizes(whole, tensor, scaled)
    for size in (small.num_heads, small.kv_heads, small.ffn_size, small.vocabulary_size):
        assert size % scaled == 0
    assert small.num_heads % small.kv_heads == 0
    assert small.num_heads // small.kv_heads == whole.num_heads // whole.kv_heads
    assert small.hidden_size == small.num_heads * small.query_size
    assert small.hidden_size <= 256
    assert small.query_size % 2 == 0
