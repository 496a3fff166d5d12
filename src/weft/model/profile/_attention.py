"""Operators of attention: multi-head, grouped-query, and latent (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.model.profile._parts import STATISTIC_BYTES, linear, norm
from weft.model.profile._profile import Operator
from weft.model.profile._sizes import ModelSizes


def attention_operators(sizes: ModelSizes, layer: int) -> Iterator[Operator]:
    """Everything between the block's first norm and its first residual sum."""
    yield from _latent(sizes) if sizes.kv_rank else _projections(sizes)
    yield _core(sizes, layer)
    values = sizes.num_heads * sizes.value_size
    # Its input, attention's result, is kept by attention itself.
    yield linear("attention.output", sizes.hidden_size, values, "row", bias=sizes.output_bias)


def _projections(sizes: ModelSizes) -> Iterator[Operator]:
    query, key = sizes.num_heads * sizes.query_size, sizes.kv_heads * sizes.query_size
    width = query + key + sizes.kv_heads * sizes.value_size
    yield linear("attention.query_key_value", width, sizes.hidden_size, "column", bias=sizes.qkv_bias)
    if sizes.qk_norm != "none":
        whole = norm("attention.query_key_norm", sizes, width=query + key, split="heads", feeds=False)
        weights = query + key if sizes.qk_norm == "full" else 2 * sizes.query_size
        yield replace(whole, parameters=weights * sizes.norm_width)
    if sizes.rotary:
        yield _rotation(query + key)


def _latent(sizes: ModelSizes) -> Iterator[Operator]:
    """Queries and keys-with-values through narrow waists, which every rank of the tensor axis has whole."""
    hidden, heads = sizes.hidden_size, sizes.num_heads
    entering = hidden
    if sizes.query_rank:
        yield linear("attention.query_down", sizes.query_rank, hidden, "replicate", bias=sizes.qkv_bias)
        yield norm("attention.query_norm", sizes, width=sizes.query_rank)
        entering = sizes.query_rank
    yield linear("attention.query_up", heads * sizes.query_size, entering, "column")
    narrow = sizes.kv_rank + sizes.rope_head_size
    yield linear("attention.key_value_down", narrow, hidden, "replicate", bias=sizes.qkv_bias)
    yield norm("attention.key_value_norm", sizes, width=sizes.kv_rank)
    expanded = heads * (sizes.query_size - sizes.rope_head_size + sizes.value_size)
    yield linear("attention.key_value_up", expanded, sizes.kv_rank, "column")
    yield _rotation((heads + 1) * sizes.rope_head_size)


def _rotation(features: int) -> Operator:
    """Rotary positions: linear in its input, so it keeps nothing."""
    return Operator(
        name="attention.rotary",
        kind="elementwise",
        split="heads",
        elements_moved_per_token=2 * features,
        selective=True,
    )


def _core(sizes: ModelSizes, layer: int) -> Operator:
    kv_heads = sizes.num_heads if sizes.kv_rank else sizes.kv_heads
    # Fused attention keeps queries, keys, values and its result, and one statistic per head and token (FlashAttention,
    # arXiv 2205.14135).
    keys = kv_heads * (sizes.query_size + sizes.value_size)
    return Operator(
        name="attention.scores",
        kind="attention",
        split="heads",
        heads=sizes.num_heads,
        kv_heads=kv_heads,
        head_size=sizes.query_size,
        value_head_size=sizes.value_size,
        causal=sizes.causal,
        window=sizes.window_of(layer),
        parameters=sizes.num_heads if sizes.attention_sinks else 0,
        kept_elements_per_token=sizes.num_heads * (sizes.query_size + sizes.value_size) + keys,
        kept_bytes_per_token=STATISTIC_BYTES * sizes.num_heads,
        dropout=sizes.attention_dropout > 0,
        selective=True,
    )
