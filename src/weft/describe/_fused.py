"""Calls that a device computes in one kernel and the meta device does not: attention, root-mean-square norms, dropout.

What they keep for backward is what the fused kernels keep: attention its operands, result and one fp32 number per query
(Dao 2023, https://arxiv.org/abs/2307.08691); the norm its input and one fp32 number per row; dropout one byte per
element, as `weft.parallel.randomness` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class FusedAttention(torch.autograd.Function):
    """(batch, heads, queries, size), keys and values alike → (batch, heads, queries, value size)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        *batch, heads, queries, _ = query.shape
        mixed = query.new_empty((*batch, queries, heads, value.shape[-1]), device="meta").transpose(-2, -3)
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32, device="meta")
        held = () if mask is None else (mask,)
        ctx.save_for_backward(query, key, value, mixed, statistics, *held)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a description has no backward")


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        statistics = x.new_empty(x.shape[:-1], dtype=torch.float32, device="meta")
        held = () if weight is None else (weight,)
        ctx.save_for_backward(x, statistics, *held)
        return torch.empty_like(x, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a description has no backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """A call that runs in one kernel."""

    run: Callable[[], Any]
    name: str | None
    """Of the event; None: the call is made of others, which are written down themselves."""
    operands: tuple[Any, ...] = ()
    settings: Mapping[str, Any]


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if query.dim() < 4:
        return None  # without heads: torch computes it step by step
    settings = {"causal": bool(given.get("is_causal")), "dropout": float(given.get("dropout_p") or 0.0)}
    operands = (query, key, value) if mask is None else (query, key, value, mask)

    def run() -> Any:
        return FusedAttention.apply(query, key, value, mask)

    return FusedCall(run=run, name="attention", operands=operands, settings=settings)


def _rms_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | dict(kwargs)
    x, weight = given["input"], given.get("weight")
    if len(given["normalized_shape"]) != 1:
        return None
    operands = (x,) if weight is None else (x, weight)

    def run() -> Any:
        return FusedNorm.apply(x, weight)

    return FusedCall(run=run, name="rms_norm", operands=operands, settings={})


def _dropout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    x, rate = given["input"], float(given.get("p", 0.5))
    training = bool(given.get("training", given.get("train", True)))

    def run() -> Any:
        return torch.native_dropout(x, rate, True)[0] if training and rate > 0 else x

    return FusedCall(run=run, name="dropout" if training and rate > 0 else None, operands=(x,), settings={"rate": rate})


FUSED: Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], FusedCall | None]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    F.dropout1d: _dropout,
    F.dropout2d: _dropout,
    F.dropout3d: _dropout,
    torch.dropout: _dropout,
}
"""Function → how it runs."""
FUSED_NAMES = ("attention", "rms_norm", "dropout")
"""Names of their events, whose first output is the result; the others are what the kernel keeps."""
