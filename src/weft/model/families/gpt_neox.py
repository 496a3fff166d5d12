"""GPT-NeoX and Pythia: attention and feed-forward side by side, and one query-key-value matrix with heads outermost.

Each head's query, key and value lie together, so the matrix is cut as one block, unlike that of GPT-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.model.families._family import Config, Family
from weft.model.families._tables import CutTable, SplitRule, Tables
from weft.model.profile import ModelSizes


class GptNeoX(Family):
    model_types = ("gpt_neox",)

    def sizes(self, config: Config) -> ModelSizes:
        biased = bool(config.get("attention_bias", True))
        base, fraction = _rotation(config)
        return ModelSizes(
            name="gpt_neox",
            num_layers=config.get("num_hidden_layers", 44),
            hidden_size=config.get("hidden_size", 6144),
            num_heads=config.get("num_attention_heads", 64),
            ffn_size=config.get("intermediate_size", 24_576),
            vocabulary_size=config.get("vocab_size", 50_432),
            sequence_length=config.get("max_position_embeddings", 2048),
            activation="gelu",
            norm="layer",
            norm_placement="parallel_two" if config.get("use_parallel_residual", True) else "before",
            norm_epsilon=float(config.get("layer_norm_eps", 1e-5)),
            rotary_base=base,
            rotary_fraction=fraction,
            qkv_bias=biased,
            output_bias=biased,
            ffn_bias=True,
            dropout=float(config.get("hidden_dropout", 0.0)),
            attention_dropout=float(config.get("attention_dropout", 0.0)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        blocks = "gpt_neox.layers.*"
        return Tables(
            split=(
                SplitRule(match="gpt_neox.embed_in", kind="vocab"),
                SplitRule(match=f"{blocks}.attention.query_key_value", kind="column"),
                SplitRule(match=f"{blocks}.attention.dense", kind="row"),
                SplitRule(match=f"{blocks}.mlp.dense_h_to_4h", kind="column"),
                SplitRule(match=f"{blocks}.mlp.dense_4h_to_h", kind="row"),
                SplitRule(match=f"{blocks}.attention.attention_probability_dropout", kind="heads"),
                SplitRule(match=f"{blocks}.attention", kind="gathered_input"),
                SplitRule(match=f"{blocks}.*_layernorm", kind="sequence"),
                SplitRule(match=f"{blocks}.post_*_dropout", kind="sequence"),
                SplitRule(match="gpt_neox.final_layer_norm", kind="sequence"),
                SplitRule(match="lm_head", kind="column"),
            ),
            cut=CutTable(
                entry="gpt_neox.embed_in",
                stem_skip=("gpt_neox.emb_dropout",),
                blocks=tuple(f"gpt_neox.layers.{index}" for index in range(sizes.num_layers)),
                tail=("gpt_neox.final_layer_norm", "lm_head"),
            ),
            vocabulary_head="lm_head",
        )


def _rotation(config: Config) -> tuple[float, float]:
    """Base of the rotary positions, and the share of a head that they turn; older releases have names of their own."""
    written = config.get("rope_parameters")
    table: Mapping[str, Any] = written if isinstance(written, Mapping) else {}
    base = table.get("rope_theta") or config.get("rotary_emb_base") or 10_000.0
    return float(base), float(table.get("partial_rotary_factor") or config.get("rotary_pct") or 0.25)


FAMILY = GptNeoX()
