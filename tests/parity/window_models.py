"""Models of `transformers` whose attention sees a window of tokens in some layers, or in all."""

from __future__ import annotations

from typing import Any

LENGTH = 21
"""Tokens of their samples: two ranks have runs of five and six, four of two and three."""
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_MISTRAL = _SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral_narrow": _MISTRAL | {"sliding_window": 3},
    "mistral_wide": _MISTRAL | {"sliding_window": 9},
    "mistral_self": _MISTRAL | {"sliding_window": 1},
    "mistral_dropping": _MISTRAL | {"sliding_window": 4, "attention_dropout": 0.1},
    "mistral_isolated": _MISTRAL | {"sliding_window": 4},
    "qwen_window": _SMALL
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "gemma_isolated": _SMALL
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma_window": _SMALL
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
