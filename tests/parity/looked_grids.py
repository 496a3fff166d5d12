"""Which models of `transformers` may have tensor ranks that form a grid: families with a file, windows or not; no other
model, whatever a look at its forward shows, and no mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cells import Cell, plan

from weft.config.recipe import ModelRecipe

LENGTH = 11
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "intermediate_size": 48, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.1},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Families with a file whose attention sees a window."""
_UNKNOWN, _ROUTED = "how features meet is known only of Weft's decoder and encoder", "its router sees all features"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "smollm3": ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, _UNKNOWN),
    "bart": (
        {
            "architectures": ["BartForConditionalGeneration"], "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2,
        },
        _UNKNOWN,
    ),
    "mixtral": ({"architectures": ["MixtralForCausalLM"], "head_dim": 8, "num_local_experts": 4}, _ROUTED),
}  # fmt: skip
"""Model → its settings, and why its tensor ranks form no grid."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    made: dict[str, ModelRecipe] = {}
    for name, config in (WINDOWED | {name: settings for name, (settings, _) in REFUSED.items()}).items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"model_type": name, **_SIZES, **config}))
        made[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH)
    return made


ALL = (
    *(Cell(name, plan(tensor=4, grid="2d")) for name in WINDOWED),
    Cell("mistral", plan(tensor=4, grid="2d", replicate=2, zero=1)),
    Cell("qwen2", plan(tensor=4, grid="2d", fused=False)),
    Cell("mistral", plan(tensor=4, grid="2d", shard=2, zero=3)),
    Cell("mistral", plan(tensor=8, grid="2.5d", micro=4)),
)
DRAWN = ALL[:1]
