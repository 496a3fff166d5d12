"""A small configuration of any family, by patterns over the names of its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 100
LENGTH = 16
"""Tokens of a sample."""
IMAGE, PATCH = 32, 8
"""Pixels along the side of an image, and of its patches."""

_BLOCKS, _KV_HEADS = -1, -2
"""Stand for what `Size` says."""
_INTEGERS: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|.*_vocab_size", VOCABULARY),
    (r".*experts_per_tok.*|.*top_k_experts|moe_topk|moe_top_?k|num_selected_experts|top_k|topk", 2),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group|num_limited_groups|n_shared_experts|num_shared_experts", 1),
    (r".*num_experts.*|.*num_local_experts.*|n_routed_experts|moe_num_experts|num_routed_experts|expert_num", 4),
    (r"first_k_dense_replace|num_dense_layers|num_first_dense|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers|num_mtp.*|mtp_.*|num_kv_shared_layers|num_global_layers", 0),
    (r".*(num|n)_(key_value|kv)_heads.*|.*multi_query_group_num|.*num_key_value_groups", _KV_HEADS),
    (r".*(num|n)_?.*heads?$|n_head|.*attention_heads|num_heads", 4),
    (r".*qk_rope_head_dim|.*qk_nope_head_dim|.*v_head_dim|qk_head_dim|.*rotary_dim|.*rope_dim|index_head_dim", 8),
    (r".*head_dim|d_kv|kv_channels|.*head_size|attention_key_size", 8),
    (r".*lora_rank|.*low_rank.*|.*_rank", 8),
    (r".*max_position_embeddings|n_positions|max_seq_?_?len.*|n_ctx|max_target_positions|.*seq_length", 64),
    (r"max_source_positions", 32),
    (r".*(num_hidden|num|n|encoder|decoder|hidden|num_encoder|num_decoder|num_block|conv)_?layers?", _BLOCKS),
    (r".*num_blocks|.*depth|.*encoder_layers|.*decoder_layers|num_hidden_groups", _BLOCKS),
    (r".*(intermediate|ffn|ff|feed_?forward|inner|mlp)_?(size|dim|hidden_size|.*dim).*|d_ff|n_inner|d_inner", 64),
    (
        r".*(embedding_size|embed_dim|hidden_size|hidden_dim|d_model|n_embd|hidden_sizes?|projection_dim|_width|width)",
        32,
    ),
    (r"dim|.*model_dim|output_dim|out_hidden_size|.*proj_dim|.*d_text|d_vision|.*mm_hidden.*|.*embd_dim", 32),
    (r".*state_size|.*d_state|.*ssm_state.*", 8),
    (r".*lru_width", 32),
    (r".*time_step_rank|.*dt_rank", 4),
    (r".*chunk_size", 16),
    (r".*sliding_window.*|.*attention_window.*|.*window_size|.*local_window.*", 8),
    (r"image_size|.*image_size|img_size", IMAGE),
    (r"patch_size|.*patch_size", PATCH),
    (r"num_mel_bins|.*num_mel_bins|feature_size", 16),
)
_PER_LAYER = re.compile(r"(layer_types|.*layers?_types?|.*block_types?|mlp_layer_types|.*pattern.*)")
_TOKENS = re.compile(r".*token(_id|_index)$|.*_token_id|.*_token_index")
_WIDTHS = re.compile(r".*(hidden_sizes|embed_dims?|depths|channels|out_channels|dims|widths)$|conv_dim")
_KEPT = re.compile(
    r".*(num_channels|in_channels|in_chans|num_labels|type_vocab_size|spatial_.*|temporal_.*)|use_.*|conv_(stride|kernel)"
)


@dataclass(frozen=True, slots=True)
class Size:
    """What some families want otherwise than others: they are tried in turn."""

    blocks: int
    kv_heads: int


SIZES = (Size(2, 2), Size(4, 2), Size(2, 4), Size(4, 4), Size(8, 4))


def small_settings(settings: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """What to give the constructor of a configuration whose defaults are `settings`; sub-configurations are nested."""
    small: dict[str, Any] = {}
    tokens = 0
    for name, value in settings.items():
        if isinstance(value, dict):
            if "model_type" in value:
                small[name] = small_settings(value, size) | {"model_type": value["model_type"]}
        elif _TOKENS.fullmatch(name):
            if isinstance(value, int):
                tokens += 1
                small[name] = tokens
        elif type(value) is int and value > 0 and not _KEPT.fullmatch(name):
            wanted = next((number for pattern, number in _INTEGERS if re.fullmatch(pattern, name)), None)
            if wanted is not None:
                small[name] = min(value, {_BLOCKS: size.blocks, _KV_HEADS: size.kv_heads}.get(wanted, wanted))
        elif _is_of_stages(name, value):
            small |= _list(name, list(value))
    return small


def _is_of_stages(name: str, value: Any) -> bool:
    if _PER_LAYER.fullmatch(name) or _KEPT.fullmatch(name) or not isinstance(value, list | tuple):
        return False
    return bool(value) and all(type(one) is int for one in value)


def _list(name: str, value: list[int]) -> dict[str, list[int]]:
    """Sizes of stages: as they are to one another, and narrow; or both sides of an image."""
    if name in ("image_size", "patch_size"):
        return {name: [IMAGE if name == "image_size" else PATCH] * len(value)}
    if name.endswith(("depths", "layers", "num_blocks")):
        return {name: [min(one, 2) for one in value]}
    if _WIDTHS.fullmatch(name) and max(value) > 64:
        smallest = min(value)
        return {name: [max(8, 16 * one // smallest) for one in value]} if smallest > 0 else {}
    if name.endswith(("num_heads", "num_attention_heads")):
        return {name: [min(one, 4) for one in value]}
    return {}
