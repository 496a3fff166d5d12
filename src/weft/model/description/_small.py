"""The small form of a model, on which plans are checked: fewer blocks, narrow layers, and the same structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config.plan import default_ffn_size
from weft.config.recipe import HF_KEYS, ConvNetShape, DecoderShape, MlpShape, ReferenceShape, hf_size
from weft.model.description._shapes import sizes_of_shape
from weft.model.families import family_of
from weft.model.profile import ModelSizes

SMALL_SEQUENCE_LENGTH = 11
"""Odd on purpose: no axis divides it."""
_NARROW = 64
"""A model of this width or less keeps its widths."""
_VOCABULARY_PER_RANK = 37
_FEW_EXPERTS = 4
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("n_group", "num_experts_per_tok"), 2),
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Counts of a mixture in a small model."""
_LATENT: Mapping[str, int] = {
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6,
}  # fmt: skip
"""Widths of latent attention in a small model."""


def shrink_shape(
    shape: ReferenceShape,
    num_blocks: int,
    tensor: int,
    folded_tensor: int,
    length: int = SMALL_SEQUENCE_LENGTH,
    *,
    experts: int = 1,
) -> ReferenceShape:
    """Return a reference model with so many blocks, narrow layers of which `folded_tensor` ranks can have parts,
    mixtures whose experts `experts` ranks can share out, and samples of `length` tokens at most."""
    if isinstance(shape, MlpShape):
        hidden = min(shape.hidden_size, 14)
        return replace(
            shape,
            num_layers=num_blocks,
            input_size=min(shape.input_size, 13),
            hidden_size=hidden,
            ffn_size=_odd_share(hidden * default_ffn_size(shape) / shape.hidden_size, folded_tensor),
            num_classes=min(shape.num_classes, 10),
        )
    if isinstance(shape, ConvNetShape):
        return replace(
            shape,
            num_layers=num_blocks,
            channels=_few_channels(shape, folded_tensor),
            num_classes=min(shape.num_classes, 10),
            image_size=min(shape.image_size, 7),
        )
    whole = sizes_of_shape(shape)
    assert whole is not None, "a decoder or an encoder"
    small = shrink_sizes(whole, tensor, folded_tensor)
    sizes = {
        "num_layers": num_blocks,
        "hidden_size": small.hidden_size,
        "num_heads": small.num_heads,
        "num_kv_heads": small.kv_heads,
        "ffn_size": small.ffn_size,
        "vocabulary_size": small.vocabulary_size,
        "sequence_length": min(shape.sequence_length, length),
    }
    if getattr(shape, "num_kv_heads", None) is None:
        del sizes["num_kv_heads"]
    if isinstance(shape, DecoderShape) and shape.num_experts:
        sizes |= _small_mixture(shape, num_blocks, small.hidden_size, folded_tensor, experts)
    return replace(shape, **sizes)


def _few_channels(shape: ConvNetShape, folded_tensor: int) -> int:
    """Return a small number of channels that ranks can divide, or the groups of a group norm of 8 channels."""
    if folded_tensor == 1:
        return min(shape.channels, 8)
    return _odd_share(8, folded_tensor) if shape.norm == "batch" else 8 * folded_tensor


def _small_mixture(shape: DecoderShape, num_blocks: int, hidden: int, folded_tensor: int, ranks: int) -> dict[str, int]:
    """Few experts, of which a token still leaves some out, and a block with a mixture behind dense ones."""
    width = shape.expert_ffn_size or default_ffn_size(shape)
    num_experts = _few_experts(shape.num_experts, ranks)
    return {
        "num_experts": num_experts,
        "top_k": min(shape.top_k, max(1, num_experts // 2)) if shape.top_k < shape.num_experts else num_experts,
        "expert_ffn_size": _odd_share(hidden * width / shape.hidden_size, folded_tensor),
        "shared_experts": min(shape.shared_experts, 1),
        "first_dense_layers": min(shape.first_dense_layers, 1, num_blocks - 1),
    }


def _few_experts(whole: int, divisor: int) -> int:
    """Return a number of experts that `divisor` divides, where it divides the whole."""
    return min(whole, divisor * -(-_FEW_EXPERTS // divisor))


def shrink_config(
    config: Mapping[str, Any], num_blocks: int | None, tensor: int, folded_tensor: int, *, experts: int = 1
) -> dict[str, Any]:
    """Return a Hugging Face configuration with fewer blocks and narrower layers of the same structure, and mixtures
    whose experts `experts` ranks can share out.

    Settings that are not known to be sizes stay as they are; lists with one entry per block are thinned out.
    """
    small = dict(config)
    whole = hf_size(config, "num_layers")
    if whole is not None and num_blocks:
        kept = [round(index * (whole - 1) / max(1, num_blocks - 1)) for index in range(num_blocks)]
        small[next(key for key in HF_KEYS["num_layers"] if config.get(key) == whole)] = num_blocks
        for name, value in config.items():
            if isinstance(value, list) and len(value) == whole and whole > 1:
                small[name] = [value[index] for index in kept]
    sizes = _sizes_of(config)
    if sizes is not None:
        new = shrink_sizes(sizes, tensor, folded_tensor)
        if new != sizes:
            _enter_sizes(small, config, sizes, new, folded_tensor)
            _enter_mixture(small, config, experts)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # a family's defaults may lie outside, too
            value = config.get(name)
            small[name] = value % new.vocabulary_size if isinstance(value, int) else None
    return small


def shrink_sizes(sizes: ModelSizes, tensor: int, folded_tensor: int) -> ModelSizes:
    """Return small widths that `folded_tensor` divides.

    Kept are how many heads share a key, whether a rank of the plan's `tensor` ranks has one key-value head or more, the
    ratio of the feed-forward layer, and whether the heads together are as wide as the model.
    """
    width, vocabulary, ffn = sizes.hidden_size, sizes.vocabulary_size, sizes.ffn_size
    is_narrow = width <= _NARROW and vocabulary <= 16 * _NARROW and ffn <= 8 * _NARROW
    if is_narrow and tensor == folded_tensor:
        return sizes
    group = max(1, sizes.num_heads // sizes.kv_heads)
    per_rank = 1 if sizes.kv_heads <= tensor > 1 or folded_tensor * group > 32 else 2
    kv_heads = folded_tensor * per_rank if sizes.kv_heads > 1 or folded_tensor > 1 else 1
    while kv_heads * group > 128:
        group //= 2
    heads = kv_heads * group
    head_size = 2 if heads >= 16 else 4 if heads >= 8 else 6
    hidden = heads * head_size + (0 if _fills_hidden(sizes) else 4)
    share = folded_tensor if vocabulary % folded_tensor == 0 else 1
    return replace(
        sizes,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        ffn_size=_odd_share(hidden * ffn / width, folded_tensor),
        vocabulary_size=min(vocabulary, share * _VOCABULARY_PER_RANK),
    )


def _fills_hidden(sizes: ModelSizes) -> bool:
    return sizes.hidden_size == sizes.num_heads * sizes.query_size


def _odd_share(size: float, parts: int) -> int:
    """Return a size near `size` of which each of `parts` ranks has an odd number."""
    return parts * (max(1, int(size / parts)) | 1)


def _sizes_of(config: Mapping[str, Any]) -> ModelSizes | None:
    """Return sizes as the configuration's family reads them, else as most families would; None: it is
    no transformer."""
    hidden, heads = hf_size(config, "hidden_size"), hf_size(config, "num_heads")
    if hidden is None or heads is None:
        return None
    family = family_of(str(config.get("model_type")))
    if family is not None:
        return family.sizes(config)
    return ModelSizes(
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=hf_size(config, "num_kv_heads") or heads,
        head_size=hf_size(config, "head_size") or hidden // heads,
        ffn_size=hf_size(config, "ffn_size") or 4 * hidden,
        vocabulary_size=hf_size(config, "vocabulary_size") or 32_000,
        sequence_length=1,
    )


def _enter_sizes(
    small: dict[str, Any], config: Mapping[str, Any], old: ModelSizes, new: ModelSizes, folded_tensor: int
) -> None:
    for size in ("hidden_size", "num_heads", "num_kv_heads", "ffn_size", "head_size"):
        small |= {key: getattr(new, size) for key in HF_KEYS[size] if config.get(key) is not None}
    if not _fills_hidden(old):
        small["head_dim"] = new.head_size
    if isinstance(config.get("rotary_dim"), int):
        small["rotary_dim"] = min(config["rotary_dim"], new.query_size // 2 * 2)
    small["vocab_size"] = new.vocabulary_size
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        value = config.get(name)
        if isinstance(value, int):
            small[name] = _odd_share(new.hidden_size * value / old.hidden_size, folded_tensor)
    if new.kv_rank:
        small |= {name: min(config.get(name, most), most) for name, most in _LATENT.items() if config.get(name, most)}
        small |= {"head_dim": small["qk_rope_head_dim"], "num_key_value_heads": new.num_heads}
        small["qk_head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]


def _enter_mixture(small: dict[str, Any], config: Mapping[str, Any], ranks: int) -> None:
    counts = {name: value for name, value in config.items() if type(value) is int}
    small |= {name: min(counts[name], most) for name, most in _MOST.items() if name in counts}
    divisor = math.lcm(ranks, small["n_group"] if "n_group" in counts else 1)  # groups of a router are as large
    small |= {name: _few_experts(counts[name], divisor) for name in HF_KEYS["num_experts"] if name in counts}
