"""The same model as a Hugging Face configuration: what DeepSpeed and Accelerate are given to build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.interop.systems._system import model_lacks
from weft.model.profile import ModelSizes

Config = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HuggingFaceFamily:
    """A family of models of transformers: what it can be, and its configuration."""

    model_type: str
    config: Callable[[ModelSizes], Config]
    kinds: Mapping[str, tuple[object, ...]]
    """Question about a model (`_kinds_of`) → the answers that the family allows; any, if the question is absent."""
    also: Callable[[ModelSizes], bool] = lambda _: True
    """Further condition on the sizes, which no question covers."""

    def fits(self, sizes: ModelSizes) -> bool:
        kinds = _kinds_of(sizes)
        return all(kinds[kind] in answers for kind, answers in self.kinds.items()) and self.also(sizes)


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


def _kinds_of(sizes: ModelSizes) -> Mapping[str, object]:
    """Questions about a model, with their answers."""
    special = (sizes.head_bias, sizes.attention_sinks, sizes.token_types, sizes.patch_values)
    positions = "learned" if sizes.learned_positions else "none"
    if sizes.rotary:
        positions = "rotary" if sizes.rotary_fraction == 1 else "partly rotary"
    # Each answer is compared with those that a family allows: a model that a family cannot express must not be emitted
    # as a similar one.
    mixtures = [sizes.is_mixture(layer) for layer in range(sizes.num_layers)] if sizes.num_experts else []
    return {
        "is_plain": sizes.causal and sizes.head == "vocabulary" and not any(special),
        "has_stem_norm": sizes.stem_norm,
        "norm": (sizes.norm, sizes.norm_width, sizes.norm_placement),
        "activation": sizes.activation,
        "positions": positions,
        "has_dropout": bool(sizes.dropout),
        "biases": (sizes.qkv_bias, sizes.output_bias, sizes.ffn_bias),
        "has_window": sizes.window is not None,
        "full_every": sizes.full_attention_every,
        "qk_norm": sizes.qk_norm,
        "is_latent": bool(sizes.kv_rank),
        "groups_heads": sizes.kv_heads != sizes.num_heads,
        "fills_hidden": sizes.query_size * sizes.num_heads == sizes.hidden_size,
        "has_like_values": bool(sizes.kv_rank) or sizes.value_size == sizes.query_size,
        "experts": "none" if not mixtures else "all" if all(mixtures) else "some",
        "shares_experts": bool(sizes.shared_ffn_size),
        "has_shared_gate": sizes.shared_gate,
        "has_router_bias": sizes.router_bias,
    }


_YES, _NO = (True,), (False,)
_NONE, _QKV, _ALL = ((False,) * 3,), ((True, False, False),), ((True,) * 3,)
"""Biases of queries, keys and values, of the output of attention, and of the feed-forward."""
_PLAIN = {"is_plain": _YES, "has_stem_norm": _NO}
_LLAMA = {
    **_PLAIN,
    "norm": (("rms", 1, "before"),),
    "activation": ("swiglu",),
    "positions": ("rotary",),
    "has_dropout": _NO,
    "has_like_values": _YES,
}
"""RMSNorm, rotary positions and a gated feed-forward, no dropout but in attention."""
_DENSE = {"experts": ("none",), "is_latent": _NO}
_DENSE_LLAMA = {**_LLAMA, **_DENSE, "has_window": _NO, "qk_norm": ("none",)}
_GPT = {
    **_PLAIN,
    **_DENSE,
    "norm": (("layer", 2, "before"),),
    "activation": ("gelu",),
    "biases": _ALL,
    "groups_heads": _NO,
    "fills_hidden": _YES,
    "has_window": _NO,
    "qk_norm": ("none",),
}
"""LayerNorm, biases everywhere, whole heads, four matrices of attention alike."""
_MIXTURE = {**_LLAMA, "is_latent": _NO, "has_router_bias": _NO}
_ROTARY = ("rotary", "partly rotary")


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


def _mixtral(sizes: ModelSizes) -> Config:
    return {
        **_llama(sizes),
        "intermediate_size": sizes.expert_ffn_size,
        "num_local_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "sliding_window": sizes.window,
        "output_router_logits": False,
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
        # One group of experts, and scores as they are: what Weft's sizes say of the router.
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
    # It has LayerNorm, and head sizes that follow from the hidden size.
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


def _qwen(config: Callable[[ModelSizes], Config]) -> Callable[[ModelSizes], Config]:
    return lambda sizes: {**config(sizes), "use_sliding_window": False}


_FAMILIES = (
    _HuggingFaceFamily(
        model_type="llama",
        config=lambda sizes: {**_llama(sizes), "mlp_bias": sizes.ffn_bias},
        kinds={**_DENSE_LLAMA, "biases": (*_NONE, *_ALL, (False, False, True), (True, True, False))},
    ),
    _HuggingFaceFamily(
        model_type="mistral",
        config=lambda sizes: {**_llama(sizes), "sliding_window": sizes.window},
        kinds={**_DENSE_LLAMA, "has_window": _YES, "full_every": (0,), "biases": _NONE},
    ),
    _HuggingFaceFamily(
        model_type="qwen2",
        config=_qwen(_llama),
        kinds={**_DENSE_LLAMA, "biases": _QKV, "fills_hidden": _YES},
    ),
    _HuggingFaceFamily(
        model_type="qwen3",
        config=_qwen(_llama),
        kinds={**_DENSE_LLAMA, "qk_norm": ("head",), "biases": (*_NONE, (True, True, False))},
    ),
    _HuggingFaceFamily(
        model_type="mixtral",
        config=_mixtral,
        kinds={**_MIXTURE, "experts": ("all",), "shares_experts": _NO, "qk_norm": ("none",), "biases": _NONE},
        also=lambda sizes: sizes.window is None or not sizes.full_attention_every,
    ),
    _HuggingFaceFamily(
        model_type="qwen3_moe",
        config=_qwen(_mixture),
        kinds={
            **_MIXTURE,
            "experts": ("all", "some"),
            "shares_experts": _NO,
            "qk_norm": ("head",),
            "biases": (*_NONE, (True, True, False)),
            "has_window": _NO,
        },
    ),
    _HuggingFaceFamily(
        model_type="qwen2_moe",
        config=_qwen(lambda sizes: {**_mixture(sizes), "shared_expert_intermediate_size": sizes.shared_ffn_size}),
        kinds={
            **_MIXTURE,
            "experts": ("all", "some"),
            "has_shared_gate": _YES,
            "qk_norm": ("none",),
            "biases": _QKV,
            "has_window": _NO,
        },
    ),
    _HuggingFaceFamily(
        model_type="deepseek_v3",
        config=_latent,
        kinds={**_LLAMA, "is_latent": _YES, "experts": ("all", "some"), "has_router_bias": _YES, "biases": _NONE},
        also=lambda sizes: (
            bool(sizes.query_rank) and sizes.shared_ffn_size % sizes.expert_ffn_size == 0 and sizes.expert_every == 1
        ),
    ),
    _HuggingFaceFamily(
        model_type="gemma",
        config=_gemma,
        kinds={**_DENSE_LLAMA, "activation": ("geglu",), "biases": _NONE},
    ),
    _HuggingFaceFamily(
        model_type="gemma2",
        config=lambda sizes: {
            **_gemma(sizes),
            "sliding_window": sizes.window,
            "query_pre_attn_scalar": sizes.query_size,
        },
        kinds={
            **_LLAMA,
            **_DENSE,
            "activation": ("geglu",),
            "norm": (("rms", 1, "both"),),
            "full_every": (2,),
            "biases": _NONE,
            "qk_norm": ("none",),
        },
    ),
    _HuggingFaceFamily(model_type="gpt2", config=_gpt2, kinds={**_GPT, "positions": ("learned",)}),
    _HuggingFaceFamily(
        model_type="opt",
        config=_opt,
        kinds={**_GPT, "activation": ("relu",), "positions": ("learned",)},
        also=lambda sizes: sizes.learned_positions > 2,
    ),
    _HuggingFaceFamily(
        model_type="bloom",
        config=_bloom,
        kinds={**_GPT, "has_stem_norm": _YES, "positions": ("none",)},
        also=lambda sizes: sizes.ffn_size == 4 * sizes.hidden_size,
    ),
    _HuggingFaceFamily(
        model_type="gpt_neox",
        config=_neox,
        kinds={**_GPT, "norm": (("layer", 2, "parallel_two"),), "positions": _ROTARY},
    ),
    _HuggingFaceFamily(
        model_type="nemotron",
        config=_nemotron,
        kinds={
            **_PLAIN,
            **_DENSE,
            "norm": (("layer", 2, "before"),),
            "activation": ("squared_relu",),
            "positions": _ROTARY,
            "biases": _NONE,
            "has_window": _NO,
            "has_dropout": _NO,
        },
    ),
)
