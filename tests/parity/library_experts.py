"""Mixtures of `transformers` whose experts ranks share out: `ALL` is for `make parity`, `DRAWN` for every run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cells import Cell, plan

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint

LENGTH = 11
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "intermediate_size": 20, "moe_intermediate_size": 20,
    "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
_BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "mixtral_balanced": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 6, **_BALANCED,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "mlp_only_layers": [0],
        "attention_dropout": 0.1,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **_LATENT},
    "gpt_oss": {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4},
    "olmoe": {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 4},
    "glm4_moe": {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip
LOOKED = ("gpt_oss", "olmoe", "glm4_moe")
"""Families without a file: looking at a forward shows their experts."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(_SIZES | config))
        found[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH)
        if name in LOOKED:
            found[name] = ModelRecipe(factory="library_experts:build_looked", arguments={"path": str(path)})
    return found


def build_looked(path: str) -> Blueprint:
    """The model of a configuration with all that looking at it shows.  A process looks once (seconds of work, which a
    user's recipe has from the store of descriptions)."""
    return copy.deepcopy(_looked_at(path))


@cache
def _looked_at(path: str) -> Blueprint:
    model = ModelRecipe(hf=path, sequence_length=LENGTH)
    return build_blueprint(Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1)))


def _cells(model: str, *plans: Plan) -> list[Cell]:
    return [Cell(model, chosen) for chosen in plans]


def alone() -> Iterator[Cell]:
    for zero in (0, 1, 2, 3):
        yield from _cells("mixtral", plan(expert=2, shard=2, zero=zero), plan(expert=4, shard=4, zero=zero, micro=3))
        yield from _cells("deepseek_v3", plan(expert=2, shard=2, zero=zero, micro=6))
    yield from _cells("deepseek_v3", plan(expert=3, shard=3, zero=1), plan(expert=6, shard=6, zero=3))
    for model in ("qwen3_moe", *LOOKED):
        yield from _cells(model, plan(expert=2, shard=2, zero=1), plan(expert=4, shard=4, zero=3, micro=1))
    for micro in (2, 6):  # in several microbatches, auxiliary losses first take one more forward of each
        yield from _cells("mixtral_balanced", plan(expert=2, shard=2, zero=1, micro=micro))


def with_others() -> Iterator[Cell]:
    for zero in (0, 1, 2, 3):
        yield from _cells("qwen3_moe", plan(expert=2, shard=2, replicate=2, zero=zero, micro=3))
        yield from _cells("mixtral", plan(expert=2, shard=2, zero=zero, tensor=2))
    for word in ("full", "selective"):
        for zero in (1, 3):
            yield from _cells("mixtral", plan(expert=2, shard=2, zero=zero, recompute=word))
            yield from _cells("deepseek_v3", plan(expert=2, shard=2, zero=zero, recompute=word))
        yield from _cells("gpt_oss", plan(expert=2, shard=2, zero=1, recompute=word))
        sequence = plan(expert=2, shard=2, zero=1, tensor=2, sequence=True, recompute=word)
        yield from _cells("mixtral", sequence)
        yield from _cells("qwen3_moe", sequence)
    for zero in (0, 1, 3):
        yield from _cells("mixtral", plan(expert=2, shard=2, zero=zero, pipeline=2, micro=1))
        yield from _cells("deepseek_v3", plan(expert=2, shard=2, zero=zero, pipeline=2, micro=1))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells("mixtral", plan(expert=2, shard=2, zero=1, pipeline=2, schedule=schedule, chunks=2, micro=1))
    yield from _cells("qwen3_moe", plan(expert=2, shard=2, zero=1, tensor=2, pipeline=2, sequence=True, micro=1))
    yield from _cells("mixtral_balanced", plan(expert=2, shard=2, zero=3, tensor=2, micro=3, recompute="full"))
    yield from _cells("mixtral", plan(expert=2, shard=4, zero=2, micro=1, every="microbatch"))
    yield from _cells("olmoe", plan(expert=2, shard=2, zero=1, pipeline=2, micro=1), plan(expert=2, shard=4, micro=1))


def with_context() -> Iterator[Cell]:
    """Ranks that share a sequence have experts of each other."""
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells("mixtral", plan(context=2, scheme=scheme), plan(context=2, expert=2, scheme=scheme, zero=1))
        yield from _cells("qwen3_moe", plan(context=2, expert=2, scheme=scheme))
        yield from _cells("deepseek_v3", plan(context=2, expert=2, scheme=scheme, zero=1))
    for word in ("full", "selective"):
        yield from _cells("mixtral", plan(context=2, expert=2, shard=2, zero=1, recompute=word))
    yield from _cells("mixtral", plan(context=2, expert=2, zero=3, scheme="all_gather", tensor=2))
    yield from _cells("deepseek_v3", plan(context=2), plan(context=2, expert=3, shard=3, zero=3, micro=2))
    yield from _cells("qwen3_moe", plan(context=2, expert=4, shard=2, pipeline=2, zero=1, micro=1))
    yield from _cells("qwen3_moe", plan(context=2, expert=2, shard=2, pipeline=2, zero=3, micro=1))
    for model in ("olmoe", "glm4_moe"):
        for scheme in ("ring", "all_gather", "ulysses"):
            yield from _cells(model, plan(context=2, expert=2, scheme=scheme, zero=1))
        yield from _cells(model, plan(context=2, expert=4, shard=2, zero=3, recompute="selective"))
        yield from _cells(model, plan(context=2, expert=2, zero=1, micro=6, exchange="all_gather", recompute="full"))
        yield from _cells(model, plan(context=2, expert=2, tensor=2, micro=6))
    for scheme in ("ring", "ulysses"):  # sinks
        yield from _cells("gpt_oss", plan(context=2, expert=2, scheme=scheme, zero=1))


def gathered() -> Iterator[Cell]:
    """Tokens that are gathered instead of sent."""
    for model in ("mixtral", "qwen3_moe", "deepseek_v3", *LOOKED):
        yield from _cells(model, plan(expert=2, shard=2, zero=1, exchange="all_gather"))
    yield from _cells("mixtral", plan(expert=4, shard=4, zero=3, micro=3, exchange="all_gather"))
    for word in ("full", "selective"):
        yield from _cells("deepseek_v3", plan(expert=2, shard=2, zero=1, recompute=word, exchange="all_gather"))
    for sequence in (False, True):
        yield from _cells("qwen3_moe", plan(expert=2, shard=2, tensor=2, sequence=sequence, exchange="all_gather"))
    yield from _cells("deepseek_v3", plan(context=2, expert=3, shard=3, zero=3, micro=2, exchange="all_gather"))
    yield from _cells("mixtral", plan(context=2, expert=2, shard=2, zero=1, exchange="all_gather", scheme="ulysses"))
    yield from _cells(
        "qwen3_moe", plan(context=2, expert=4, shard=2, pipeline=2, zero=1, micro=1, exchange="all_gather")
    )
    yield from _cells("mixtral_balanced", plan(expert=2, shard=2, zero=1, micro=2, exchange="all_gather"))


ALL = tuple(dict.fromkeys([*alone(), *with_others(), *with_context(), *gathered()]))
DRAWN = (
    Cell("mixtral", plan(expert=2, shard=2, zero=1, tensor=2, sequence=True, recompute="full")),
    Cell("deepseek_v3", plan(expert=3, shard=3, zero=1)),
    Cell("gpt_oss", plan(expert=2, shard=2, zero=1, recompute="selective")),
    Cell("qwen3_moe", plan(context=2, expert=4, shard=2, pipeline=2, zero=1, micro=1)),
    Cell("mixtral_balanced", plan(expert=2, shard=2, zero=1, micro=2)),
    Cell("deepseek_v3", plan(context=2, expert=3, shard=3, zero=3, micro=2, exchange="all_gather")),
    Cell("qwen3_moe", plan(expert=2, shard=2, zero=1, recompute="full", exchange="all_gather")),
)
