"""Families of `transformers` without a file whose tensor ranks form a square: looking at them shows that they may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import Cell, plan

from weft.config.recipe import ModelRecipe

LENGTH = 11
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "intermediate_size": 48, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True, "no_rope_layers": [1, 0]},
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"], "residual_dropout": 0.0, "embedding_dropout": 0.0,
        "attention_dropout": 0.1, "tie_word_embeddings": True,
    },
    "arcee": {"architectures": ["ArceeForCausalLM"], "head_dim": 8, "attention_dropout": 0.1},
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 8, "partial_rotary_factor": 0.5},
    "phi": {
        "architectures": ["PhiForCausalLM"], "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1,
    },
    "stablelm": {"architectures": ["StableLmForCausalLM"], "use_qkv_bias": True, "hidden_dropout": 0.1},
    "persimmon": {"architectures": ["PersimmonForCausalLM"], "hidden_dropout": 0.1, "attention_dropout": 0.0},
    "gptj": {
        "architectures": ["GPTJForCausalLM"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "rotary_dim": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
    },
    "distilbert": {
        "architectures": ["DistilBertForMaskedLM"], "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "dropout": 0.1, "attention_dropout": 0.1,
    },
    # A file says how their layers split, and looking how they attend through windows.
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.1},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "head_dim": 8, "num_local_experts": 4, "sliding_window": 4,
    },
    "roberta": {
        "architectures": ["RobertaForMaskedLM"], "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
    "electra": {
        "architectures": ["ElectraForMaskedLM"], "embedding_size": 16, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
}  # fmt: skip
_PADDED = ("gptj", "distilbert", "electra", "roberta")
"""Families that want a number for padding."""
REFUSED = {"gpt_neox_japanese": ({"pad_token_id": 1}, "cannot work on a part of the features")}
"""Family → settings, and what of its forward stands in the way."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in (CONFIGS | {name: settings for name, (settings, _) in REFUSED.items()}).items():
        path = folder / f"{name}.json"
        sizes = SIZES | ({"pad_token_id": 1} if name in _PADDED else {})
        path.write_text(json.dumps({"model_type": name, **sizes, **config}))
        found[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH)
    return found


def _cells() -> Iterator[Cell]:
    for name in CONFIGS:
        yield Cell(name, plan(tensor=4, grid="2d"))
    yield Cell("arcee", plan(tensor=4, grid="2d", recompute="full"))
    yield Cell("starcoder2", plan(tensor=4, grid="2d", fused=False))
    yield Cell("electra", plan(tensor=4, grid="2d", shard=2, zero=3))
    yield Cell("distilbert", plan(tensor=4, grid="2d", replicate=2, zero=1, recompute="selective"))
    yield Cell("stablelm", plan(tensor=8, grid="2.5d", micro=4))


ALL = tuple(_cells())
DRAWN = tuple(cell for cell in ALL if cell.model == "roberta" or cell.plan.memory.recompute == "full")
