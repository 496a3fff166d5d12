"""Folders of small random models of families that nobody chose: drawn from the library's own lists with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim", "state_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    "pad_token_id": 0,
}
"""What a configuration is told of these where it has them; all else has the library's default."""

_LARGEST = 3_000_000
"""Parameters above which a configuration did not let itself be made small by `SIZES`."""


def drawn_models(seed: int, number: int, *, masked: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (model type, model of the library in evaluation) of types drawn without replacement.

    Left out are those that the library itself cannot build and run from these sizes alone.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kinds = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES if masked else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    ends = ("ForMaskedLM",) if masked else ("ForCausalLM", "LMHeadModel")
    names = sorted(name for name, kind in kinds.items() if kind.endswith(ends))
    random.Random(seed).shuffle(names)
    for name in names:
        if number == 0:
            return
        model = small_model(auto, name)
        if model is not None:
            number -= 1
            yield name, model


def small_model(auto: Any, model_type: str) -> Any:
    """A random model whose every floating tensor is told apart from its class's constants; None if it cannot be."""
    import transformers

    try:
        usual = transformers.AutoConfig.for_model(model_type).to_dict()
        changes = {name: value for name, value in SIZES.items() if name in usual}
        config = transformers.AutoConfig.for_model(model_type, **changes)
        with torch.device("meta"):
            outline = auto.from_config(config)
        if sum(parameter.numel() for parameter in outline.parameters()) > _LARGEST:
            return None
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        logits_of(model, tokens())
    except Exception:  # whatever stands between these sizes and a model of this type
        return None
    return model


def tokens() -> Tensor:
    return torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


def save(model: Any, folder: Path) -> Path:
    """As `save_pretrained` writes it, in several files."""
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder
