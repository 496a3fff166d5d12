"""Mixtures of experts over squares of tensor ranks: each rank of a row computes routers and experts whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import Cell, plan
from looked_grids import LENGTH, SIZES

from weft.config.recipe import ModelRecipe

EIGHT: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "attention_dropout": 0.1, **EIGHT},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "head_dim": 8, **EIGHT},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 16, **EIGHT},
    "hy_v3": {
        "architectures": ["HYV3ForCausalLM"], "num_experts": 4, "head_dim": 8, "expert_hidden_dim": 24,
        "num_shared_experts": 1, **EIGHT,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8,
        **EIGHT,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "shared_expert_intermediate_size": 24, **EIGHT,
    },
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4, **EIGHT},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "head_dim": 8, **EIGHT},
}  # fmt: skip
REFUSED = {
    "phimoe": ({"architectures": ["PhimoeForCausalLM"], "num_local_experts": 4, **EIGHT}, "draws random numbers")
}
"""Family → settings, and what of its forward stands in the way."""
BREAKAGES = ("experts see a part", "own gradients of experts", "own gradients of tokens", "experts of another part")


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in (CONFIGS | {name: settings for name, (settings, _) in REFUSED.items()}).items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, **SIZES, **config}))
        found[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH)
    return found


ALL = tuple(Cell(name, plan(tensor=4, grid="2d")) for name in CONFIGS)
"""Of 16 experts of a small batch some see no token on a row."""


def _combined() -> Iterator[Cell]:
    for name in ("olmoe", "hy_v3"):
        yield Cell(name, plan(tensor=4, grid="2d", shard=2, zero=3))
        yield Cell(name, plan(tensor=4, grid="2d", replicate=2, zero=1, micro=2))
        yield Cell(name, plan(tensor=4, grid="2d", recompute="full"))
        yield Cell(name, plan(tensor=4, grid="2d", recompute="selective"))
    yield Cell("olmoe", plan(tensor=8, grid="2.5d", micro=4))
    yield Cell("mixtral", plan(tensor=4, grid="2d", recompute="full"))


COMBINED = tuple(_combined())
