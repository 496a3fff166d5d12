"""Llama, Mistral, Qwen 2 (biases on query, key and value) and Qwen 3 (norms on the heads of query and key)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.model.families._family import Config, Family
from weft.model.families._tables import CutTable, SplitRule, Tables
from weft.model.profile import ModelSizes

_LONGEST = {"llama": 2048, "mistral": 131_072}
"""Default of `max_position_embeddings` in transformers, by model type; other types have 32,768."""
_WINDOW_OF_MISTRAL = 4096
_FULL_LAYERS_OF_QWEN = 28


class Llama(Family):
    model_types = ("llama", "mistral", "qwen2", "qwen3")

    def sizes(self, config: Config) -> ModelSizes:
        kind, heads = config["model_type"], config["num_attention_heads"]
        biased = bool(config.get("attention_bias"))
        return ModelSizes(
            name=kind,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or (128 if kind == "qwen3" else None),
            ffn_size=config["intermediate_size"],
            vocabulary_size=config["vocab_size"],
            sequence_length=config.get("max_position_embeddings") or _LONGEST.get(kind, 32_768),
            window=config.get("sliding_window", _WINDOW_OF_MISTRAL) if kind == "mistral" else None,
            qk_norm="head" if kind == "qwen3" else "none",
            qkv_bias=biased or kind == "qwen2",
            output_bias=biased and kind != "qwen2",
            ffn_bias=bool(config.get("mlp_bias")),
            attention_dropout=float(config.get("attention_dropout") or 0.0),
            rotary_base=_rotary_base(config),
            norm_epsilon=float(config.get("rms_norm_eps") or 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        blocks = "model.layers.*"
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        norms = ("self_attn.q_norm", "self_attn.k_norm") if sizes.qk_norm == "head" else ()
        per_head = (*norms, "self_attn.attention_probability_dropout")
        return Tables(
            split=(
                SplitRule(match="model.embed_tokens", kind="vocab"),
                *(SplitRule(match=f"{blocks}.{name}", kind="column") for name in columns),
                SplitRule(match=f"{blocks}.self_attn.o_proj", kind="row"),
                SplitRule(match=f"{blocks}.mlp.down_proj", kind="row"),
                *(SplitRule(match=f"{blocks}.{name}", kind="heads") for name in per_head),
                SplitRule(match=f"{blocks}.self_attn", kind="gathered_input"),
                SplitRule(match=f"{blocks}.*_layernorm", kind="sequence"),
                SplitRule(match="model.norm", kind="sequence"),
                # The head is read by the vocabulary loss alone, which wants it split.
                SplitRule(match="lm_head", kind="column"),
            ),
            cut=CutTable(
                entry="model.embed_tokens",
                blocks=tuple(f"model.layers.{index}" for index in range(sizes.num_layers)),
                tail=("model.norm", "lm_head"),
            ),
            vocabulary_head="lm_head",
        )

    def has_windows(self, config: Config) -> bool:
        layers = config.get("layer_types")
        if layers is not None:
            return "sliding_attention" in layers
        if config.get("model_type") == "mistral":
            return config.get("sliding_window", _WINDOW_OF_MISTRAL) is not None
        if not config.get("use_sliding_window", False) or config.get("sliding_window", _WINDOW_OF_MISTRAL) is None:
            return False
        return config.get("max_window_layers", _FULL_LAYERS_OF_QWEN) < config.get("num_hidden_layers", 0)


def _rotary_base(config: Mapping[str, Any]) -> float:
    """Transformers 5 writes `rope_parameters`, older releases `rope_theta`."""
    parameters = config.get("rope_parameters")
    table: Any = parameters if isinstance(parameters, Mapping) else config
    return float(table.get("rope_theta") or config.get("rope_theta") or 10_000.0)


FAMILY = Llama()
