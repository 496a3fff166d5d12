"""Mixtral and Qwen 3 MoE: Llama with mixtures of experts, whose two matrices each lie stacked in one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.errors import RecipeError
from weft.model.families import llama
from weft.model.families._family import Config, Family
from weft.model.families._tables import SplitRule, Tables
from weft.model.profile import ModelSizes

_KV_HEADS = {"mixtral": 8, "qwen3_moe": 4}
_LONGEST = {"mixtral": 131_072, "qwen3_moe": 32_768}


class Mixtral(Family):
    model_types = ("mixtral", "qwen3_moe")
    router = "model.layers.*.mlp.gate"

    def sizes(self, config: Config) -> ModelSizes:
        kind = config["model_type"]
        is_qwen = kind == "qwen3_moe"
        dense = llama.FAMILY.sizes(
            {
                "num_key_value_heads": _KV_HEADS[kind],
                "max_position_embeddings": _LONGEST[kind],
                **{name: value for name, value in config.items() if value is not None},
                "model_type": "llama",
            }
        )
        experts = config.get("num_local_experts") or config.get("num_experts") or (128 if is_qwen else 8)
        return replace(
            dense,
            name=kind,
            head_size=config.get("head_dim"),
            qk_norm="head" if is_qwen else "none",
            window=config.get("sliding_window") if self.has_windows(config) else None,
            norm_epsilon=float(config.get("rms_norm_eps") or (1e-6 if is_qwen else 1e-5)),
            ffn_size=dense.ffn_size if is_qwen else 0,
            num_experts=experts,
            top_k=config.get("num_experts_per_tok") or (8 if is_qwen else 2),
            expert_ffn_size=config["moe_intermediate_size"] if is_qwen else config["intermediate_size"],
            leading_dense_layers=_leading_dense(config),
            expert_every=config.get("decoder_sparse_step") or 1,
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        llama_tables = llama.FAMILY.tables(config, sizes)
        mixtures = [f"model.layers.{layer}.mlp" for layer in range(sizes.num_layers) if sizes.is_mixture(layer)]
        dense = len(mixtures) < sizes.num_layers
        rules = [rule for rule in llama_tables.split if dense or ".mlp." not in rule.match]
        return replace(llama_tables, split=(*_mixture_rules(mixtures), *rules))

    def has_windows(self, config: Config) -> bool:
        if config.get("model_type") == "mixtral":
            return config.get("sliding_window") is not None
        return bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None


def _mixture_rules(mixtures: Sequence[str]) -> Iterator[SplitRule]:
    """Each tensor rank has a part of every expert; the router, and what is done with its choices, is whole."""
    for name in mixtures:
        yield SplitRule(match=f"{name}.experts", kind="expert")
        yield SplitRule(match=f"{name}.experts.gate_up_proj", kind="part", dim=1, blocks=2)
        yield SplitRule(match=f"{name}.experts.down_proj", kind="part", dim=2)
        yield SplitRule(match=name, kind="replicate")


def _leading_dense(config: Config) -> int:
    """Layers at the beginning without a mixture, beside those that `decoder_sparse_step` leaves out."""
    listed = sorted(config.get("mlp_only_layers") or ())
    if listed != list(range(len(listed))) or (listed and (config.get("decoder_sparse_step") or 1) > 1):
        raise RecipeError(
            f"mlp_only_layers = {listed} are not the first layers alone, and only of those Weft knows what they cost."
            " List 0, 1, … or leave it empty, with decoder_sparse_step = 1"
        )
    return len(listed)


FAMILY = Mixtral()
