"""BERT: the whole prediction head is one tail module, for it holds the decoder's bias itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.model.families._family import Config, Family
from weft.model.families._tables import CutTable, SplitRule, Tables
from weft.model.profile import ModelSizes

_BIAS, _ALIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"
"""The bias of the vocabulary, which the head holds a second time and never reads."""


class Bert(Family):
    model_types = ("bert",)
    task = "masked_lm"

    def sizes(self, config: Config) -> ModelSizes:
        positions = config.get("max_position_embeddings", 512)
        return ModelSizes(
            name="bert",
            num_layers=config.get("num_hidden_layers", 12),
            hidden_size=config.get("hidden_size", 768),
            num_heads=config.get("num_attention_heads", 12),
            ffn_size=config.get("intermediate_size", 3072),
            vocabulary_size=config.get("vocab_size", 30522),
            sequence_length=positions,
            learned_positions=positions,
            token_types=config.get("type_vocab_size", 2),
            causal=False,
            activation="gelu",
            norm="layer",
            norm_placement="after",
            stem_norm=True,
            rotary=False,
            qkv_bias=True,
            output_bias=True,
            ffn_bias=True,
            head="masked",
            head_bias=True,
            dropout=float(config.get("hidden_dropout_prob", 0.1)),
            attention_dropout=float(config.get("attention_probs_dropout_prob", 0.1)),
            tied=bool(config.get("tie_word_embeddings", True)),
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        blocks, embeddings = "bert.encoder.layer.*", "bert.embeddings"
        return Tables(
            split=(
                SplitRule(match=f"{embeddings}.word_embeddings", kind="vocab"),
                SplitRule(match=f"{blocks}.attention.self", kind="gathered_input"),
                *(SplitRule(match=f"{blocks}.attention.self.{n}", kind="column") for n in ("query", "key", "value")),
                SplitRule(match=f"{blocks}.attention.self.dropout", kind="heads"),
                SplitRule(match=f"{blocks}.attention.output.dense", kind="row"),
                SplitRule(match=f"{blocks}.intermediate.dense", kind="column"),
                SplitRule(match=f"{blocks}.output.dense", kind="row"),
                SplitRule(match=f"{blocks}.output.LayerNorm", kind="sequence"),
                SplitRule(match=f"{blocks}.output.dropout", kind="sequence"),
                SplitRule(match="cls.predictions.decoder", kind="column"),
            ),
            cut=CutTable(
                entry=f"{embeddings}.word_embeddings",
                stem_zero=(f"{embeddings}.token_type_embeddings", f"{embeddings}.position_embeddings"),
                stem_skip=(f"{embeddings}.LayerNorm", f"{embeddings}.dropout"),
                blocks=tuple(f"bert.encoder.layer.{index}" for index in range(sizes.num_layers)),
                tail=("cls",),
            ),
            vocabulary_head="cls.predictions.decoder",
        )

    def adapt(self, model: Any) -> None:
        """Leave the bias of the vocabulary to the linear layer that uses it, so that both are split as one."""
        del model.cls.predictions.bias
        model._tied_weights_keys = {name: first for name, first in model._tied_weights_keys.items() if first != _ALIAS}
        model.all_tied_weights_keys.pop(_BIAS, None)

    def exported(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return {**weights, _ALIAS: weights[_BIAS].clone()}


FAMILY = Bert()
