"""Models of `transformers` without a file whose sequence ranks share: `ALL` is for `make parity`, `DRAWN` for every
run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Cell, plan

from weft.config.plan import ContextParallelPlan, Plan
from weft.config.recipe import ModelRecipe

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "intermediate_size": 20, "head_dim": 8, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_DROPPED: dict[str, Any] = {"attention_dropout": 0.1, "residual_dropout": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "seed_oss": {"model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], **_DROPPED},
    "starcoder2": {
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "sliding_window": None,
        "embedding_dropout": 0.1, **_DROPPED,
    },
    "olmoe": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "attention_dropout": 0.1,
        **_EXPERTS,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4,
        "shared_expert_intermediate_size": 12, **_EXPERTS,
    },
    "hy_v3": {
        "model_type": "hy_v3", "architectures": ["HYV3ForCausalLM"], "num_experts": 4, "num_shared_experts": 1,
        "first_k_dense_replace": 1, **_EXPERTS,
    },
    # Few tokens, so that many of them are padding, beside which it counts its places.
    "roberta": {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 12, "pad_token_id": 1,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
}  # fmt: skip
MIXTURES = ("olmoe", "glm4_moe", "qwen2_moe", "hy_v3")
DROPPING = ("seed_oss", "starcoder2")


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(_SIZES | config))
        found[name] = ModelRecipe(factory="library_experts:build_looked", arguments={"path": str(path)})
    return found


def _cells(models: tuple[str, ...], *plans: Plan) -> list[Cell]:
    return [Cell(model, chosen) for model in models for chosen in plans]


IN_PAIRS = replace(
    plan(context=4, scheme="usp"), context_parallel=ContextParallelPlan(scheme="usp", ulysses=2)
)  # fmt: skip
"""Nothing tells how many heads they have, by which ranks would be grouped."""


def dropping() -> Iterator[Cell]:
    """Numbers that functions draw, for the tokens of a rank."""
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells(DROPPING, plan(context=2, scheme=scheme))
        yield from _cells(("seed_oss",), plan(context=4, scheme="ring" if scheme == "ulysses" else scheme, micro=6))
    yield from _cells(("seed_oss",), plan(context=3), IN_PAIRS, plan(context=2, tensor=2))
    yield from _cells(DROPPING, plan(context=2, shard=2, zero=3, micro=3), plan(context=2, zero=1))
    for word in ("full", "selective"):
        yield from _cells(DROPPING, plan(context=2, recompute=word))


def mixtures() -> Iterator[Cell]:
    """Experts that take the tokens of one rank."""
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells(MIXTURES, plan(context=2, scheme=scheme))
    for zero in (1, 2, 3):
        yield from _cells(("olmoe", "hy_v3"), plan(context=2, shard=2, zero=zero, micro=3))
    yield from _cells(MIXTURES, plan(context=4, micro=6), plan(context=2, tensor=2))
    yield from _cells(("qwen2_moe",), plan(context=3), IN_PAIRS)
    for word in ("full", "selective"):
        yield from _cells(("olmoe", "glm4_moe"), plan(context=2, recompute=word))


def beside_padding() -> Iterator[Cell]:
    """Places that depend on how much padding stands before a token."""
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells(("roberta",), plan(context=2, scheme=scheme))
    yield from _cells(("roberta",), plan(context=3, micro=6), IN_PAIRS, plan(context=2, tensor=2))
    yield from _cells(("roberta",), plan(context=2, shard=2, zero=3, micro=3, recompute="full"))


ALL = tuple(dict.fromkeys([*dropping(), *mixtures(), *beside_padding()]))
DRAWN = (
    Cell("seed_oss", plan(context=2, recompute="full")),
    Cell("starcoder2", plan(context=3, scheme="all_gather", micro=6)),
    Cell("glm4_moe", plan(context=2, tensor=2)),
    Cell("hy_v3", plan(context=2, shard=2, zero=3, micro=3, scheme="ulysses")),
    Cell("roberta", plan(context=2, scheme="ring")),
)
