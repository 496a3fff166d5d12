"""GPT-2: its query-key-value is one matrix of three blocks, each of which is cut on its own."""

from __future__ import annotations

from typing import Any

from weft.model.families._family import Config, Family
from weft.model.families._tables import CutTable, Localise, SplitRule, Tables
from weft.model.profile import ModelSizes


class Gpt2(Family):
    model_types = ("gpt2",)

    def sizes(self, config: Config) -> ModelSizes:
        hidden, positions = config.get("n_embd", 768), config.get("n_positions", 1024)
        return ModelSizes(
            name="gpt2",
            num_layers=config.get("n_layer", 12),
            hidden_size=hidden,
            num_heads=config.get("n_head", 12),
            ffn_size=config.get("n_inner") or 4 * hidden,
            vocabulary_size=config.get("vocab_size", 50257),
            sequence_length=positions,
            learned_positions=positions,
            activation="gelu",
            norm="layer",
            rotary=False,
            qkv_bias=True,
            output_bias=True,
            ffn_bias=True,
            dropout=float(config.get("resid_pdrop", 0.1)),
            attention_dropout=float(config.get("attn_pdrop", 0.1)),
            tied=bool(config.get("tie_word_embeddings", True)),
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        blocks = "transformer.h.*"
        return Tables(
            split=(
                SplitRule(match="transformer.wte", kind="vocab"),
                SplitRule(match=f"{blocks}.attn.c_attn", kind="column", blocks=3),
                SplitRule(match=f"{blocks}.attn.attn_dropout", kind="heads"),
                SplitRule(match=f"{blocks}.attn.c_proj", kind="row"),
                SplitRule(match=f"{blocks}.mlp.c_fc", kind="column"),
                SplitRule(match=f"{blocks}.mlp.c_proj", kind="row"),
                SplitRule(match=f"{blocks}.ln_?", kind="sequence"),
                SplitRule(match=f"{blocks}.attn.resid_dropout", kind="sequence"),
                SplitRule(match=f"{blocks}.mlp.dropout", kind="sequence"),
                SplitRule(match="transformer.ln_f", kind="sequence"),
                SplitRule(match="lm_head", kind="column"),
            ),
            localise=(
                Localise(match=f"{blocks}.attn", attribute="split_size"),
                Localise(match=f"{blocks}.attn", attribute="num_heads"),
            ),
            cut=CutTable(
                entry="transformer.wte",
                stem_zero=("transformer.wpe",),
                stem_skip=("transformer.drop",),
                blocks=tuple(f"transformer.h.{index}" for index in range(sizes.num_layers)),
                tail=("transformer.ln_f", "lm_head"),
            ),
            vocabulary_head="lm_head",
        )

    def named(self, size: str) -> str:
        return "n_inner" if size == "ffn_size" else super().named(size)

    def prepare(self, config: Any) -> None:
        config.pad_token_id = None  # it looks for padding in every batch, which Weft never makes


FAMILY = Gpt2()
