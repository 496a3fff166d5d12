"""Small models of every family that has a file, and of every type that it names, drawn from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from weft.config.recipe import ModelRecipe
from weft.model.families import families

TYPES = tuple(kind for family in families() for kind in family.model_types)
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WHERE_THERE: dict[str, Any] = {
    "num_key_value_heads": (2, 4), "head_dim": (8,), "sliding_window": (None,), "num_local_experts": (4, 6),
    "n_routed_experts": (4,), "num_experts_per_tok": (2,), "moe_intermediate_size": (20,),
    "first_k_dense_replace": (1,), "n_group": (2,), "topk_group": (1,), "q_lora_rank": (16, None),
    "kv_lora_rank": (12,), "qk_rope_head_dim": (4,), "qk_nope_head_dim": (8,), "v_head_dim": (8,),
    "qk_head_dim": (12,),
}  # fmt: skip
"""Sizes of some types only, with what is drawn for them."""


def small_config(model_type: str, seed: int) -> dict[str, Any]:
    """The library's defaults, narrow, with dropouts.

    Switches (biases, ties, residuals) are drawn; an odd seed has the opposite of the even one before it, so that two
    seeds have both settings of each.
    """
    from transformers import AutoConfig

    draw = random.Random(f"{model_type} {seed // 2}")
    usual = AutoConfig.for_model(model_type).to_dict()
    changes = dict(_SIZES)
    for name, value in usual.items():
        if name in _WHERE_THERE:
            changes[name] = draw.choice(_WHERE_THERE[name])
        elif isinstance(value, bool) and ("bias" in name or "residual" in name or name.startswith("tie_word")):
            changes[name] = (draw.random() < 0.5) == (seed % 2 == 0)
        elif isinstance(value, int | float) and ("drop" in name or "_pdrop" in name) and "classifier" not in name:
            changes[name] = 0.1
    if "qk_rope_head_dim" in changes:  # what latent attention calls the width of a head
        changes |= {"head_dim": changes["qk_rope_head_dim"], "num_key_value_heads": changes["num_attention_heads"]}
    return AutoConfig.for_model(model_type, **changes).to_dict()


def small_model(model_type: str, seed: int, folder: Path) -> ModelRecipe:
    """A recipe's model of `small_config`, which is written into `folder`."""
    path = folder / f"{model_type}-{seed}.json"
    path.write_text(json.dumps(small_config(model_type, seed)))
    return ModelRecipe(hf=str(path), sequence_length=11)
