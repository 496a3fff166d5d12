"""Models of `transformers` that do more to their scores than to scale them, or that Weft lets call the attention
interface; one that pools for nothing."""

from __future__ import annotations

from typing import Any

_BERT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DROPPING = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_XGLM: dict[str, Any] = {
    "model_type": "xglm", "architectures": ["XGLMForCausalLM"], "d_model": 32, "ffn_dim": 48, "num_layers": 2,
    "attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_BLOOM: dict[str, Any] = {
    "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 32, "n_layer": 2, "n_head": 4,
    "vocab_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 4, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_CAPPED = _GROUPED | {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 2,
}  # fmt: skip
_SINKS = _GROUPED | {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_LAYOUT = _BERT | {
    "model_type": "layoutlm", "architectures": ["LayoutLMForMaskedLM"], "max_2d_position_embeddings": 64,
}  # fmt: skip
SCORED: dict[str, dict[str, Any]] = {
    "xglm": _XGLM,
    "xglm_dropping": _XGLM | {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "bloom": _BLOOM,
    "bloom_dropping": _BLOOM | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "layoutlm": _LAYOUT | _DROPPING,
    "capped": _CAPPED,
    "capped_dropping": _CAPPED | {"attention_dropout": 0.1},
    "capped_isolated": _CAPPED,
    "sinks": _SINKS,
    "sinks_dropping": _SINKS | {"attention_dropout": 0.1},
}
