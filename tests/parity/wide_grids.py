"""Families whose forwards do more with features than parts allow by themselves: heads that are found by their logits,
scaled embeddings, norms of whole widths, dropout by functions, products of which a row is given all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import Cell, plan
from looked_grids import LENGTH, SIZES

from weft.config.recipe import ModelRecipe

CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "architectures": ["OPTForCausalLM"], "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1,
        "attention_dropout": 0.1, "pad_token_id": 1,
    },
    "ctrl": {
        "architectures": ["CTRLLMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    },
    "xglm": {
        "architectures": ["XGLMForCausalLM"], "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48,
        "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "pad_token_id": 1,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 8, "residual_dropout": 0.1},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "layer_types": None, "pad_token_id": 0},
    "cohere": {"architectures": ["CohereForCausalLM"], "pad_token_id": 0},
    "nemotron": {"architectures": ["NemotronForCausalLM"], "attention_dropout": 0.1},
    "bloom": {
        "architectures": ["BloomForCausalLM"], "n_head": 4, "n_layer": 2, "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"], "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


BREAKAGES = (
    ("scale of an embedding left out", "xglm"),
    ("first part for all", "xglm"),
    ("weights of norms as they are", "gemma2"),
    ("norms by part", "olmo2"),
    ("own gradients of wholes", "minicpm3"),
    ("drops as the first rank", "seed_oss"),
    ("logits of another part", "opt"),
)
"""What is broken, and the family whose cell shows it."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in CONFIGS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, **SIZES, **config}))
        found[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH)
    return found


def _cells() -> Iterator[Cell]:
    for name in CONFIGS:
        yield Cell(name, plan(tensor=4, grid="2d"))


ALL = tuple(_cells())


def _combined() -> Iterator[Cell]:
    """Rules of squares beside what gathers weights or computes again: logits, results that are whole, norms."""
    for name in ("opt", "minicpm3", "olmo2", "xglm"):
        yield Cell(name, plan(tensor=4, grid="2d", shard=2, zero=3))
        yield Cell(name, plan(tensor=4, grid="2d", recompute="full"))
        yield Cell(name, plan(tensor=4, grid="2d", recompute="selective"))
    for name in ("opt", "minicpm3"):
        yield Cell(name, plan(tensor=8, grid="2.5d", micro=4))
        yield Cell(name, plan(tensor=4, grid="2d", replicate=2, zero=1, micro=6))


COMBINED = tuple(_combined())
