"""Calls that a device computes in one kernel and the meta device does not: attention, root-mean-square norms, dropout.

What they keep for backward is what the fused kernels keep: attention its operands, result and one fp32 number per query
(Dao 2023, https://arxiv.org/abs/2307.08691); the norm its input and one fp32 number per row; dropout one byte per
element, as `weft.techniques.randomness.keyed_dropout` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.attention.call import (
    PLAIN,
    MaskPattern,
    ScoreMod,
    attend,
    attend_here,
    attend_multi_head,
    multi_head_call,
)


class FusedAttention(torch.autograd.Function):
    """(batch, heads, queries, size), keys and values alike → (batch, heads, queries, value size)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mixed = _laid_out_like(query, value.shape[-1])
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32, device="meta")
        masks = () if mask is None else (mask,)
        ctx.save_for_backward(query, key, value, mixed, statistics, *masks)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a description has no backward")


def _laid_out_like(query: Tensor, features: int) -> Tensor:
    """Attention's result: its dims lie in memory in the order of the query's, as kernels on CPUs and GPUs write it."""
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], features)
    laid = query.new_empty([shape[dim] for dim in order], device="meta")
    return laid.permute([order.index(dim) for dim in range(query.dim())])


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        statistics = x.new_empty(x.shape[:-1], dtype=torch.float32, device="meta")
        weights = () if weight is None else (weight,)
        ctx.save_for_backward(x, statistics, *weights)
        return torch.empty_like(x, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a description has no backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """A call that runs in one kernel."""

    run: Callable[[], Any]
    name: str | None
    """Name of the event; None: the call is made of others, which are written down themselves."""
    composed: bool = False
    """Whether those others may be fused in their turn."""
    operands: tuple[Any, ...] = ()
    settings: Mapping[str, Any]


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    bound = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if query.dim() < 4:
        return None  # without heads: torch computes it step by step
    _check_shapes(query, key, mask, grouped=bool(bound.get("enable_gqa")))
    settings = {"causal": bool(bound.get("is_causal")), "dropout": float(bound.get("dropout_p") or 0.0)}
    settings["scale"] = float(bound.get("scale") or query.shape[-1] ** -0.5)
    operands = (query, key, value) if mask is None else (query, key, value, mask)

    def run() -> Any:
        return FusedAttention.apply(query, key, value, mask)

    return FusedCall(run=run, name="attention", operands=operands, settings=settings)


def _check_shapes(query: Tensor, key: Tensor, mask: Tensor | None, *, grouped: bool) -> None:
    """Raise what the kernel would, where operands do not fit together."""
    heads = torch.Size([*key.shape[:-3], query.shape[-3]]) if grouped else key.shape[:-2]
    if grouped and query.shape[-3] % key.shape[-3]:
        raise RuntimeError(f"attention of {query.shape[-3]} heads over {key.shape[-3]} key heads")
    batch = torch.broadcast_shapes(query.shape[:-2], heads)
    if mask is not None:
        torch.broadcast_shapes(mask.shape, (*batch, query.shape[-2], key.shape[-2]))


def _rms_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    bound = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | dict(kwargs)
    x, weight = bound["input"], bound.get("weight")
    if len(bound["normalized_shape"]) != 1:
        return None
    operands = (x,) if weight is None else (x, weight)

    def run() -> Any:
        return FusedNorm.apply(x, weight)

    return FusedCall(run=run, name="rms_norm", operands=operands, settings={})


def _dropout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    x, rate = bound["input"], float(bound.get("p", 0.5))
    training = bool(bound.get("training", bound.get("train", True)))

    def run() -> Any:
        return torch.native_dropout(x, rate, True)[0] if training and rate > 0 else x

    return FusedCall(run=run, name="dropout" if training and rate > 0 else None, operands=(x,), settings={"rate": rate})


def _multi_head_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """`nn.MultiheadAttention` without its weights returned, as it computes on a device: through fused attention."""
    bound = multi_head_call(args, kwargs)
    if bound is None:
        return None

    def run() -> Any:
        return attend_multi_head(bound, F.scaled_dot_product_attention)

    return FusedCall(run=run, name=None, composed=True, settings={})


def _in_parts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """Attention that no kernel does as a whole: it is what it is made of."""
    return FusedCall(run=lambda: attend_here(*args, **kwargs), name=None, composed=True, settings={})


def _in_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: MaskPattern,
    mod: ScoreMod = PLAIN,
    *,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> FusedCall | None:
    """Return attention as one call, where it matters which tokens see one another. A mask that says no more than the
    window is left out."""
    if mask is not None and pattern.window is not None:
        from weft.model.hf import window_of  # whose masks these are

        mask = None if window_of(mask) == pattern.window else mask
    settings = {"is_causal": pattern.causal and mask is None, "scale": mod.scale}
    call = _attention((query, key, value, mask), {**settings, "enable_gqa": query.shape[1] != key.shape[1]})
    if call is None:
        return None
    more: dict[str, Any] = {"window": pattern.window or 0, "softcap": mod.softcap or 0.0}
    more |= {name: each for name, each in (("slopes", mod.slopes), ("sinks", mod.sinks)) if each is not None}
    return replace(call, settings={**call.settings, **more})


Fused = Mapping[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], FusedCall | None]]
"""Function → how it runs; None: in parts."""
FUSED: Fused = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    F.dropout1d: _dropout,
    F.dropout2d: _dropout,
    F.dropout3d: _dropout,
    torch.dropout: _dropout,
    F.multi_head_attention_forward: _multi_head_attention,
    attend: _in_parts,
}
WHOLE_ATTENTION: Fused = {**FUSED, attend: lambda args, kwargs: _in_one(*args, **kwargs)}
"""The same functions, with every attention as one call."""
FUSED_NAMES = ("attention", "rms_norm", "dropout")
"""Names of their events, whose first output is the result; the others are what the kernel keeps."""
