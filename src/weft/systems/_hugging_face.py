"""The same model as a Hugging Face configuration: what DeepSpeed and Accelerate are given to build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.profile import ModelSizes
from weft.systems._common import model_lacks

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family of models of transformers: what it can be, and its configuration."""

    model_type: str
    fits: Callable[[ModelSizes], bool]
    config: Callable[[ModelSizes], Config]


def hugging_face_config(sizes: ModelSizes) -> Mapping[str, Any] | None:
    """Return `config.json` of a model; None where no family of transformers that Weft knows is this model."""
    for family in _FAMILIES:
        if family.fits(sizes):
            shared = {
                "model_type": family.model_type,
                "vocab_size": sizes.vocabulary_size,
                "tie_word_embeddings": sizes.tied,
                "use_cache": False,
            }
            return {**shared, **family.config(sizes)}
    return None


def hugging_face_lacks(sizes: ModelSizes) -> Iterator[str]:
    """Yield what keeps a model from being built by transformers."""
    yield from model_lacks(sizes)
    if hugging_face_config(sizes) is None:
        names = ", ".join(dict.fromkeys(family.model_type for family in _FAMILIES))
        yield f"a model of its kind: of the families of transformers, Weft writes {names}, and {sizes.name} is none"


# ── what models are ───────────────────────────────────────────────────────────────────────────────────────────────────


def _is_plain(sizes: ModelSizes) -> bool:
    """Whether nothing but embedding, blocks, last norm and head is there."""
    special = (sizes.stem_norm, sizes.head_bias, sizes.attention_sinks, sizes.token_types, sizes.patch_values)
    return sizes.causal and sizes.head == "vocabulary" and not any(special)


def _is_llama(sizes: ModelSizes, activation: str = "swiglu", placement: str = "before") -> bool:
    """RMSNorm, rotary positions and a gated feed-forward, no dropout but in attention."""
    return (
        _is_plain(sizes)
        and sizes.norm == "rms"
        and sizes.norm_width == 1
        and sizes.norm_placement == placement
        and sizes.activation == activation
        and sizes.rotary
        and sizes.rotary_fraction == 1
        and not sizes.dropout
        and (bool(sizes.kv_rank) or sizes.value_size == sizes.query_size)
    )


def _is_dense(sizes: ModelSizes) -> bool:
    return not sizes.num_experts and not sizes.kv_rank


def _biases(sizes: ModelSizes) -> tuple[bool, bool, bool]:
    return sizes.qkv_bias, sizes.output_bias, sizes.ffn_bias


def _is_gpt(sizes: ModelSizes, placement: str = "before") -> bool:
    """LayerNorm, biases everywhere, whole heads, four matrices of attention alike."""
    return (
        _is_plain(sizes)
        and _is_dense(sizes)
        and sizes.norm == "layer"
        and sizes.norm_width == 2
        and sizes.norm_placement == placement
        and _biases(sizes) == (True, True, True)
        and sizes.kv_heads == sizes.num_heads
        and sizes.query_size * sizes.num_heads == sizes.hidden_size
        and sizes.window is None
        and sizes.qk_norm == "none"
    )


def _is_mixture_everywhere(sizes: ModelSizes) -> bool:
    return bool(sizes.num_experts) and all(sizes.is_mixture(layer) for layer in range(sizes.num_layers))


# ── what their configurations say ─────────────────────────────────────────────────────────────────────────────────────


def _llama(sizes: ModelSizes) -> Config:
    return {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.query_size,
        "intermediate_size": sizes.ffn_size or sizes.expert_ffn_size,
        "max_position_embeddings": sizes.sequence_length,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.norm_epsilon,
        # Releases from 5 on read the second, earlier ones the first.
        "rope_theta": sizes.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rotary_base},
        "attention_dropout": sizes.attention_dropout,
        "attention_bias": sizes.qkv_bias,
    }


def _mixture(sizes: ModelSizes) -> Config:
    return {
        **_llama(sizes),
        "moe_intermediate_size": sizes.expert_ffn_size,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": sizes.expert_every,
        "mlp_only_layers": list(range(sizes.leading_dense_layers)),
        "output_router_logits": False,
    }


def _latent(sizes: ModelSizes) -> Config:
    return {
        **_llama(sizes),
        "head_dim": sizes.rope_head_size,
        "moe_intermediate_size": sizes.expert_ffn_size,
        "n_routed_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "n_shared_experts": sizes.shared_ffn_size // sizes.expert_ffn_size,
        "first_k_dense_replace": sizes.leading_dense_layers,
        "moe_layer_freq": sizes.expert_every,
        "q_lora_rank": sizes.query_rank or None,
        "kv_lora_rank": sizes.kv_rank,
        "qk_nope_head_dim": sizes.query_size - sizes.rope_head_size,
        "qk_rope_head_dim": sizes.rope_head_size,
        "v_head_dim": sizes.value_size,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _gpt2(sizes: ModelSizes) -> Config:
    return {
        "n_embd": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "n_inner": sizes.ffn_size,
        "n_positions": sizes.learned_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": sizes.norm_epsilon,
        "embd_pdrop": sizes.dropout,
        "resid_pdrop": sizes.dropout,
        "attn_pdrop": sizes.attention_dropout,
    }


def _opt(sizes: ModelSizes) -> Config:
    return {
        "hidden_size": sizes.hidden_size,
        "word_embed_proj_dim": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "ffn_dim": sizes.ffn_size,
        # Two more rows are its own.
        "max_position_embeddings": sizes.learned_positions - 2,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": sizes.dropout,
        "attention_dropout": sizes.attention_dropout,
    }


def _bloom(sizes: ModelSizes) -> Config:
    return {
        "hidden_size": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "layer_norm_epsilon": sizes.norm_epsilon,
        "hidden_dropout": sizes.dropout,
        "attention_dropout": sizes.attention_dropout,
    }


def _neox(sizes: ModelSizes) -> Config:
    base = _llama(sizes)
    del base["rms_norm_eps"], base["head_dim"], base["num_key_value_heads"]
    return {
        **base,
        "hidden_act": "gelu",
        "layer_norm_eps": sizes.norm_epsilon,
        "attention_bias": True,
        "rotary_pct": sizes.rotary_fraction,
        "rotary_emb_base": sizes.rotary_base,
        "partial_rotary_factor": sizes.rotary_fraction,
        "rope_parameters": {**base["rope_parameters"], "partial_rotary_factor": sizes.rotary_fraction},
        "use_parallel_residual": True,
        "hidden_dropout": sizes.dropout,
    }


def _nemotron(sizes: ModelSizes) -> Config:
    base = _llama(sizes)
    del base["rms_norm_eps"]
    return {
        **base,
        "hidden_act": "relu2",
        "norm_eps": sizes.norm_epsilon,
        "partial_rotary_factor": sizes.rotary_fraction,
        "rope_parameters": {**base["rope_parameters"], "partial_rotary_factor": sizes.rotary_fraction},
        "mlp_bias": False,
    }


def _gemma(sizes: ModelSizes) -> Config:
    act = "gelu_pytorch_tanh"
    return {**_llama(sizes), "hidden_act": act, "hidden_activation": act}


def _without_window(sizes: ModelSizes) -> bool:
    return sizes.window is None


_FAMILIES = (
    _Family(
        model_type="llama",
        fits=lambda s: (
            _is_llama(s) and _is_dense(s) and _without_window(s) and s.qk_norm == "none" and s.qkv_bias == s.output_bias
        ),
        config=lambda s: {**_llama(s), "mlp_bias": s.ffn_bias},
    ),
    _Family(
        model_type="mistral",
        fits=lambda s: (
            _is_llama(s)
            and _is_dense(s)
            and s.window is not None
            and not s.full_attention_every
            and s.qk_norm == "none"
            and not any(_biases(s))
        ),
        config=lambda s: {**_llama(s), "sliding_window": s.window},
    ),
    _Family(
        model_type="qwen2",
        fits=lambda s: (
            _is_llama(s)
            and _is_dense(s)
            and _without_window(s)
            and s.qk_norm == "none"
            and _biases(s) == (True, False, False)
            and s.query_size * s.num_heads == s.hidden_size
        ),
        config=lambda s: {**_llama(s), "use_sliding_window": False},
    ),
    _Family(
        model_type="qwen3",
        fits=lambda s: (
            _is_llama(s)
            and _is_dense(s)
            and _without_window(s)
            and s.qk_norm == "head"
            and not s.ffn_bias
            and s.qkv_bias == s.output_bias
        ),
        config=lambda s: {**_llama(s), "use_sliding_window": False},
    ),
    _Family(
        model_type="mixtral",
        fits=lambda s: (
            _is_llama(s)
            and _is_mixture_everywhere(s)
            and not s.kv_rank
            and not s.shared_ffn_size
            and s.qk_norm == "none"
            and not any((*_biases(s), s.router_bias))
            and (_without_window(s) or not s.full_attention_every)
        ),
        config=lambda s: {
            **_llama(s),
            "intermediate_size": s.expert_ffn_size,
            "num_local_experts": s.num_experts,
            "num_experts_per_tok": s.top_k,
            "sliding_window": s.window,
            "output_router_logits": False,
        },
    ),
    _Family(
        model_type="qwen3_moe",
        fits=lambda s: (
            _is_llama(s)
            and bool(s.num_experts)
            and not s.kv_rank
            and not s.shared_ffn_size
            and s.qk_norm == "head"
            and s.qkv_bias == s.output_bias
            and not s.ffn_bias
            and not s.router_bias
            and _without_window(s)
        ),
        config=lambda s: {**_mixture(s), "use_sliding_window": False},
    ),
    _Family(
        model_type="qwen2_moe",
        fits=lambda s: (
            _is_llama(s)
            and bool(s.num_experts)
            and not s.kv_rank
            and s.shared_gate
            and s.qk_norm == "none"
            and _biases(s) == (True, False, False)
            and not s.router_bias
            and _without_window(s)
        ),
        config=lambda s: {
            **_mixture(s),
            "shared_expert_intermediate_size": s.shared_ffn_size,
            "use_sliding_window": False,
        },
    ),
    _Family(
        model_type="deepseek_v3",
        fits=lambda s: (
            _is_llama(s)
            and bool(s.kv_rank and s.num_experts and s.query_rank and s.router_bias)
            and not any(_biases(s))
            and s.shared_ffn_size % s.expert_ffn_size == 0
            and s.expert_every == 1
        ),
        config=_latent,
    ),
    _Family(
        model_type="gemma",
        fits=lambda s: (
            _is_llama(s, "geglu")
            and _is_dense(s)
            and _without_window(s)
            and not any(_biases(s))
            and s.qk_norm == "none"
        ),
        config=_gemma,
    ),
    _Family(
        model_type="gemma2",
        fits=lambda s: (
            _is_llama(s, "geglu", "both")
            and _is_dense(s)
            and s.full_attention_every == 2
            and not any(_biases(s))
            and s.qk_norm == "none"
        ),
        config=lambda s: {**_gemma(s), "sliding_window": s.window, "query_pre_attn_scalar": s.query_size},
    ),
    _Family(
        model_type="gpt2",
        fits=lambda s: _is_gpt(s) and s.activation == "gelu" and bool(s.learned_positions) and not s.rotary,
        config=_gpt2,
    ),
    _Family(
        model_type="opt",
        fits=lambda s: _is_gpt(s) and s.activation == "relu" and s.learned_positions > 2 and not s.rotary,
        config=_opt,
    ),
    _Family(
        model_type="bloom",
        fits=lambda s: (
            _is_gpt(_replaced_stem(s))
            and s.stem_norm
            and s.activation == "gelu"
            and not s.learned_positions
            and not s.rotary
            and s.ffn_size == 4 * s.hidden_size
        ),
        config=_bloom,
    ),
    _Family(
        model_type="gpt_neox",
        fits=lambda s: _is_gpt(s, "parallel_two") and s.activation == "gelu" and s.rotary,
        config=_neox,
    ),
    _Family(
        model_type="nemotron",
        fits=lambda s: (
            _is_plain(s)
            and _is_dense(s)
            and (s.norm, s.norm_width, s.norm_placement) == ("layer", 2, "before")
            and s.activation == "squared_relu"
            and s.rotary
            and not any(_biases(s))
            and _without_window(s)
            and not s.dropout
        ),
        config=_nemotron,
    ),
)


def _replaced_stem(sizes: ModelSizes) -> ModelSizes:
    from dataclasses import replace

    return replace(sizes, stem_norm=False)
