"""Models of `transformers` that write their attention out: products, a mask, a softmax; one that pools for nothing."""

from __future__ import annotations

from typing import Any

_BERT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DROPPING = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_OPENAI: dict[str, Any] = {
    "model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
    "vocab_size": 64, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_JAPANESE: dict[str, Any] = {
    "model_type": "gpt_neox_japanese", "architectures": ["GPTNeoXJapaneseForCausalLM"], "vocab_size": 64,
    "hidden_size": 32, "intermediate_multiple_size": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NEO: dict[str, Any] = {
    "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "hidden_size": 32, "num_layers": 2,
    "num_heads": 4, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64, "resid_dropout": 0.0,
    "embed_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
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
WRITTEN: dict[str, dict[str, Any]] = {
    "openai": _OPENAI,
    "openai_dropping": _OPENAI | {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "megatron_decoder": _BERT
    | {"model_type": "megatron-bert", "architectures": ["MegatronBertForCausalLM"], "is_decoder": True},
    "megatron_masked": _BERT
    | _DROPPING
    | {"model_type": "megatron-bert", "architectures": ["MegatronBertForMaskedLM"]},
    "rembert": _BERT
    | _DROPPING
    | {
        "model_type": "rembert",
        "architectures": ["RemBertForMaskedLM"],
        "input_embedding_size": 16,
        "output_embedding_size": 24,
    },
    "japanese": _JAPANESE,
    "japanese_dropping": _JAPANESE | {"attention_dropout": 0.1},
    "japanese_isolated": _JAPANESE | {"attention_dropout": 0.1},
    "xglm": _XGLM,
    "xglm_dropping": _XGLM | {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
    "xglm_rarely": _XGLM | {"attention_dropout": 0.0003},
    "bloom": _BLOOM,
    "bloom_dropping": _BLOOM | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "layoutlm": _LAYOUT | _DROPPING,
    "capped": _CAPPED,
    "capped_dropping": _CAPPED | {"attention_dropout": 0.1},
    "capped_isolated": _CAPPED,
    "sinks": _SINKS,
    "sinks_dropping": _SINKS | {"attention_dropout": 0.1},
    "neo": _NEO | {"attention_types": [[["global"], 2]]},
    "neo_dropping": _NEO | {"attention_types": [[["global"], 2]], "attention_dropout": 0.1, "resid_dropout": 0.1},
    "neo_window": _NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "neo_wide": _NEO | {"attention_types": [[["local"], 2]], "window_size": 9, "attention_dropout": 0.1},
}
