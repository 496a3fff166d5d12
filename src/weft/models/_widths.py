"""How narrow a transformer may become and still be itself: the arithmetic of shrinking, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.families import family_of

_NARROW = 64
"""A model of this width or less keeps its widths."""
_VOCABULARY_PER_RANK = 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Sizes of a transformer's layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int

    @property
    def is_narrow(self) -> bool:
        return self.hidden <= _NARROW and self.vocabulary <= 16 * _NARROW and self.ffn <= 8 * _NARROW

    def shrunk(self, tensor: int, folded_tensor: int) -> Widths:
        """Return small widths that `folded_tensor` divides.

        Kept are how many heads share a key, whether a rank of the plan's `tensor` ranks has one key-value head or more,
        the ratio of the feed-forward layer, and whether the heads together are as wide as the model.
        """
        if self.is_narrow and tensor == folded_tensor:
            return self
        group = max(1, self.heads // self.kv_heads)
        per_rank = 1 if self.kv_heads <= tensor > 1 or folded_tensor * group > 32 else 2
        kv_heads = folded_tensor * per_rank if self.kv_heads > 1 or folded_tensor > 1 else 1
        while kv_heads * group > 128:
            group //= 2
        heads = kv_heads * group
        head_size = 2 if heads >= 16 else 4 if heads >= 8 else 6
        same = self.hidden == self.heads * self.head_size
        hidden = heads * head_size + (0 if same else 4)
        return Widths(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            ffn=_odd_share(hidden * self.ffn / self.hidden, folded_tensor),
            vocabulary=min(self.vocabulary, folded_tensor * _VOCABULARY_PER_RANK)
            if self.vocabulary % folded_tensor == 0
            else min(self.vocabulary, _VOCABULARY_PER_RANK),
        )


def _odd_share(wanted: float, parts: int) -> int:
    """Return a size near `wanted` of which each of `parts` ranks has an odd number."""
    return parts * (max(1, int(wanted / parts)) | 1)


def shrink_feed_forward(ffn: int, hidden: int, new_hidden: int, parts: int) -> int:
    """Return a feed-forward width in the same ratio to `new_hidden`; each of `parts` ranks has an odd share of it."""
    return _odd_share(new_hidden * ffn / hidden, parts)


def shrink_config(config: Mapping[str, Any], num_blocks: int | None, tensor: int, folded_tensor: int) -> dict[str, Any]:
    """Return a Hugging Face configuration with fewer blocks and narrower layers of the same structure.

    Settings that are not known to be sizes stay as they are; lists with one entry per block are thinned out.
    """
    small = dict(config)
    blocks_key = _first(config, "num_hidden_layers", "n_layer")
    if blocks_key is not None and num_blocks:
        whole = int(config[blocks_key])
        kept = [round(index * (whole - 1) / max(1, num_blocks - 1)) for index in range(num_blocks)]
        small[blocks_key] = num_blocks
        for name, value in config.items():
            if isinstance(value, list) and len(value) == whole and whole > 1:
                small[name] = [value[index] for index in kept]
    widths = _widths_of(config)
    if widths is not None:
        new = widths.shrunk(tensor, folded_tensor)
        if new != widths:
            _enter_widths(small, config, widths, new, folded_tensor)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # a family's defaults may lie outside, too
            value = config.get(name)
            small[name] = value % new.vocabulary if isinstance(value, int) else None
    return small


def _first(config: Mapping[str, Any], *names: str) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _widths_of(config: Mapping[str, Any]) -> Widths | None:
    """Sizes of the configuration, with the defaults of its family where they are left out; None: no transformer."""
    hidden_key, heads_key = _first(config, "hidden_size", "n_embd"), _first(config, "num_attention_heads", "n_head")
    if hidden_key is None or heads_key is None:
        return None
    hidden, heads = int(config[hidden_key]), int(config[heads_key])
    ffn = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    family = family_of(str(config.get("model_type")))
    head_size = config.get("head_dim") or (hidden // heads if family is None else family.sizes(config).query_size)
    return Widths(
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(head_size),
        ffn=int(ffn),
        vocabulary=int(config.get("vocab_size", 32_000)),
    )


def _enter_widths(
    small: dict[str, Any], config: Mapping[str, Any], old: Widths, new: Widths, folded_tensor: int
) -> None:
    sizes = {
        "hidden_size": new.hidden,
        "n_embd": new.hidden,
        "num_attention_heads": new.heads,
        "n_head": new.heads,
        "num_key_value_heads": new.kv_heads,
        "intermediate_size": new.ffn,
        "n_inner": new.ffn,
        "head_dim": new.head_size,
    }
    small.update({name: size for name, size in sizes.items() if config.get(name) is not None})
    if old.hidden != old.heads * old.head_size:
        small["head_dim"] = new.head_size
    if isinstance(config.get("rotary_dim"), int):
        small["rotary_dim"] = min(config["rotary_dim"], new.head_size // 2 * 2)
    small["vocab_size"] = new.vocabulary
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        value = config.get(name)
        if isinstance(value, int):
            small[name] = shrink_feed_forward(value, old.hidden, new.hidden, folded_tensor)
    for name, most in (("num_local_experts", 4), ("num_experts", 4), ("n_routed_experts", 4), ("n_group", 2)):
        value = config.get(name)
        if isinstance(value, int):
            small[name] = min(value, most)
    for name, most in (("num_experts_per_tok", 2), ("topk_group", 1)):
        value = config.get(name)
        if isinstance(value, int):
            small[name] = min(value, most)
