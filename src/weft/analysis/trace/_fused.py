"""Calls that a device computes in one kernel and the meta device does not: attention, root-mean-square norms, dropout.

What they keep for backward is what the fused kernels keep: attention its operands, result and one fp32 number per query
(Dao 2023, https://arxiv.org/abs/2307.08691); the norm its input and one fp32 number per row; dropout one byte per
element, as `weft.techniques.randomness.keyed_dropout` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.model.attention.dropping import attend_dropping, attend_in_parts, attend_in_window, attend_with_band
from weft.model.attention.scored import DrawnDropout, attend_scored


class FusedAttention(torch.autograd.Function):
    """(batch, heads, queries, size), keys and values alike → (batch, heads, queries, value size)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        mixed = _laid_out_like(query, value.shape[-1])
        statistics = query.new_empty(query.shape[:-1], dtype=torch.float32, device="meta")
        held = () if mask is None else (mask,)
        ctx.save_for_backward(query, key, value, mixed, statistics, *held)
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
    """Name of the event; None: the call is made of others, which are written down themselves."""
    composed: bool = False
    """Whether those others may be fused in their turn."""
    operands: tuple[Any, ...] = ()
    settings: Mapping[str, Any]


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if query.dim() < 4:
        return None  # without heads: torch computes it step by step
    _check_shapes(query, key, mask, grouped=bool(given.get("enable_gqa")))
    settings = {"causal": bool(given.get("is_causal")), "dropout": float(given.get("dropout_p") or 0.0)}
    settings["scale"] = float(given.get("scale") or query.shape[-1] ** -0.5)
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


def _packed_projections(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> Sequence[Tensor]:
    """Query, key and value of one matrix: one product, then a copy that parts them; or a product each."""
    if query is key and key is value:
        whole = F.linear(query, weight, bias).unflatten(-1, (3, query.shape[-1]))
        return whole.movedim(-2, 0).contiguous().unbind(0)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)]


def _multi_head_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """`nn.MultiheadAttention` without its weights returned, as it computes on a device: through fused attention."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    query, heads = given["query"], given["num_heads"]
    odd = any(given.get(name) not in (None, False) for name in _ODD_SETTINGS)
    odd = odd or any(given.get(name) is not None for name in _ODD_TENSORS)
    if query.dim() != 3 or given.get("need_weights", True) or odd:
        return None
    length, samples, width = query.shape

    def split(projected: Tensor) -> Tensor:
        keys = projected.shape[0]
        return projected.view(keys, samples * heads, -1).transpose(0, 1).view(samples, heads, keys, -1)

    def run() -> Any:
        packed = _packed_projections(
            query, given["key"], given["value"], given["in_proj_weight"], given["in_proj_bias"]
        )
        causal = bool(given.get("is_causal")) and given.get("key_padding_mask") is None
        mask = None if causal else _merged_mask(given.get("attn_mask"), given.get("key_padding_mask"), samples, heads)
        rate = given["dropout_p"] if given.get("training", True) else 0.0
        mixed = F.scaled_dot_product_attention(*map(split, packed), attn_mask=mask, dropout_p=rate, is_causal=causal)
        flat = mixed.permute(2, 0, 1, 3).contiguous().view(samples * length, width)
        return F.linear(flat, given["out_proj_weight"], given["out_proj_bias"]).view(length, samples, width), None

    return FusedCall(run=run, name=None, composed=True, settings={})


_ODD_SETTINGS = ("add_zero_attn", "use_separate_proj_weight")
_ODD_TENSORS = ("bias_k", "bias_v", "static_k", "static_v")


def _merged_mask(mask: Tensor | None, padding: Tensor | None, samples: int, heads: int) -> Tensor | None:
    """What attention adds to its scores, of a mask (queries, keys) or (samples · heads or 1, queries, keys) and of one
    (samples, keys) of padding: torch's module has made numbers of both."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.unflatten(0, (samples, heads))
    if padding is None:
        return mask
    beside = padding[:, None, None, :]
    return beside if mask is None else mask + beside


def _in_parts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """Attention that drops: no kernel does that, so it is what it is made of."""
    return FusedCall(run=lambda: attend_in_parts(*args, **kwargs), name=None, composed=True, settings={})


def _in_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """The same as one call, where it matters who sees whom."""
    query, key, value, mask, dropout = args
    settings = {"is_causal": bool(kwargs["causal"]) and mask is None, "scale": kwargs.get("scale")}
    found = _attention((query, key, value, mask), {**settings, "enable_gqa": query.shape[1] != key.shape[1]})
    if found is None or not isinstance(dropout, DrawnDropout):
        return found
    return replace(found, settings={**found.settings, "drawn": dropout.rate})


def _in_window(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """Through a window: the kernel is given a mask, or attention is what it is made of."""
    return FusedCall(run=lambda: attend_with_band(*args, **kwargs), name=None, composed=True, settings={})


def _window_in_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """The same as one call.  A mask that says nothing more than the window goes without saying."""
    from weft.model.hf import window_of  # whose masks these are

    query, key, value, mask, dropout = args
    window = kwargs["window"]
    is_said = mask is not None and window_of(mask) == window
    given = (query, key, value, None if is_said else mask, dropout)
    found = _in_one(given, {"causal": True, "scale": kwargs.get("scale")})
    return None if found is None else replace(found, settings={**found.settings, "window": window})


def _scored_in_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall | None:
    """Attention that does more to its scores as one call, whatever is seen."""
    query, key, value, bias, dropout = args
    found = _in_one((query, key, value, None, dropout), {"causal": kwargs["causal"], "scale": kwargs.get("scale")})
    if found is None:
        return None
    more = {"window": kwargs.get("window") or 0, "softcap": kwargs.get("softcap") or 0.0, "biased": bias is not None}
    sinks = kwargs.get("sinks")
    settings = {**found.settings, **more, "has_sinks": sinks is not None}
    operands = (query, key, value) if bias is None else (query, key, value, bias)
    return replace(found, operands=operands, settings=settings if sinks is None else {**settings, "sinks": sinks})


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
    attend_dropping: _in_parts,
    attend_in_window: _in_window,
}
WHOLE_ATTENTION: Fused = {
    **FUSED,
    attend_dropping: _in_one,
    attend_in_window: _window_in_one,
    attend_scored: _scored_in_one,
}
"""The same, with every attention as one call."""
FUSED_NAMES = ("attention", "rms_norm", "dropout")
"""Names of their events, whose first output is the result; the others are what the kernel keeps."""
