"""Attention as one call, whatever it does to its scores: what shares, follows or prices attention sees the call.

A call has a mask pattern (who sees whom, by position) and a score modification (what becomes of the scores before the
softmax), both as plain data: FlexAttention's `BlockMask` and `score_mod` (https://arxiv.org/abs/2412.05496) without
its code generation, so that ranks that share a sequence can do the same to the pairs of tokens at hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskPattern:
    """The keys that a query sees, by their positions in the sample."""

    causal: bool = False
    """Whether a token sees none that stands behind it."""
    window: int | None = None
    """How many tokens each sees, itself and those before it; None: all of them.  Only where it is causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMod:
    """Changes to the products of queries and keys before the softmax, in this order."""

    scale: float | None = None
    """Factor of the products; None: size of a head ** -0.5."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118); None: they stay."""
    slopes: Tensor | None = None
    """(heads,): each head adds its slope times the key's position (ALiBi, Press et al. 2022,
    https://arxiv.org/abs/2108.12409: the softmax does not see the query's); None: nothing is added."""
    sinks: Tensor | None = None
    """(heads,): one more score for every query, which attends to nothing (Xiao et al. 2023,
    https://arxiv.org/abs/2309.17453); None: there is none."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled and nothing more, as kernels do it."""
        return self.softcap is None and self.slopes is None and self.sinks is None

    def of_heads(self, start: int, heads: int) -> ScoreMod:
        """Return the same for some of the heads."""
        slopes, sinks = (
            None if tensor is None else tensor[start : start + heads] for tensor in (self.slopes, self.sinks)
        )
        return replace(self, slopes=slopes, sinks=sinks)


PLAIN = ScoreMod()


class AttentionTaker(TorchFunctionMode):
    """A mode that takes calls of `attend`, as of torch's own functions, when they are compiled, too."""


def _taken(*operands: Any, **settings: Any) -> Tensor | None:
    """Return what a mode makes of a call that a compiler follows, which asks modes about torch's own functions alone;
    None: no mode takes it."""
    if not torch.compiler.is_compiling():
        return None
    for index in range(torch._C._len_torch_function_stack()):  # pyright: ignore[reportPrivateUsage]
        mode = torch._C._get_function_stack_at(index)  # pyright: ignore[reportPrivateUsage]
        if isinstance(mode, AttentionTaker):
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] # torch leaves it then, too
                return mode.__torch_function__(attend, (), operands, settings)
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: MaskPattern,
    mod: ScoreMod = PLAIN,
    *,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> Tensor:
    """Return attention (samples, heads, queries, value size).

    Query is (samples, heads, queries, size), key and value (samples, kv heads, keys, size), kv heads dividing heads;
    the last query stands where the last key does.  A `mask` takes the pattern's place: of bool, what is seen, or of
    floats, what is added to the scores.  `dropout`, of the probabilities, is a module, so that a plan can key its draws
    by sample and layer.
    """
    inputs = (query, key, value)
    if (taken := _taken(*inputs, pattern, mod, mask=mask, dropout=dropout)) is not None:
        return taken
    if has_torch_function(inputs):
        return handle_torch_function(attend, inputs, *inputs, pattern, mod, mask=mask, dropout=dropout)
    return attend_here(*inputs, pattern, mod, mask=mask, dropout=dropout)


def attend_here(
    query: Tensor, key: Tensor, value: Tensor, pattern: MaskPattern, mod: ScoreMod = PLAIN, *,
    mask: Tensor | None = None, dropout: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """Return the same by torch's fused kernel where scores are plain and nothing is dropped, else in parts."""
    queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    # Fused kernels know causal masks; a window that hides a key needs a mask of its own.
    if mask is None and pattern.window is not None and keys > pattern.window:
        mask = band_of(queries, keys, pattern.window, query.device)
    is_fused = mod.is_plain and dropout is None
    if groups > 1 and not (is_fused and mask is None):
        # With a mask most kernels want as many heads of keys as of queries.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if is_fused:
        is_causal, is_grouped = mask is None and pattern.causal and queries > 1, query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=mod.scale, enable_gqa=is_grouped
        )
    if mask is None and pattern.causal and queries > 1:
        mask = band_of(queries, keys, keys, query.device)
    probabilities = _softmax(_scores(query, key, mod, mask), mod.sinks).to(query.dtype)
    return (probabilities if dropout is None else dropout(probabilities)) @ value


def _scores(query: Tensor, key: Tensor, mod: ScoreMod, mask: Tensor | None) -> Tensor:
    # (samples, heads, queries, size) · (samples, heads, size, keys).
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if mod.scale is None else mod.scale)
    if mod.softcap is not None:
        scores = torch.tanh(scores / mod.softcap) * mod.softcap
    if mod.slopes is not None:
        # ALiBi (Press et al. 2022): a slope per head times the key's position. The query's own position would add the
        # same number to its whole row, which a softmax does not see.
        positions = torch.arange(key.shape[2], device=key.device, dtype=mod.slopes.dtype)
        scores = scores + (mod.slopes[:, None, None] * positions).to(scores.dtype)
    if mask is None:
        return scores
    # Not −∞: a query of padding that sees no key at all gives a mean then, and no NaN.
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Probabilities in fp32 or wider, as fused kernels compute them."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    # A sink is one more score per head that takes probability and has no value: its column is cut off again.
    beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1, dtype=wide)[..., :-1]


def band_of(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the keys that each query sees: bool, (1, 1, queries, keys)."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    # The last query stands where the last key does, so query i sees keys up to i + keys - queries.
    return (every.tril(keys - queries) & every.triu(keys - queries - window + 1))[None, None]


ATTENTION = (F.scaled_dot_product_attention, attend)
"""Functions that attend."""


# ── nn.MultiheadAttention ────────────────────────────────────────────────────────────────────────────────────────────

_UNKNOWN_SETTINGS = ("add_zero_attn", "use_separate_proj_weight")
_UNKNOWN_TENSORS = ("bias_k", "bias_v", "static_k", "static_v")


def multi_head_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the arguments of a call of `F.multi_head_attention_forward` by name; None: it computes more than
    projections around `scaled_dot_product_attention` (weights returned, keys added, no batch)."""
    arguments = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    if arguments["query"].dim() != 3 or arguments.get("need_weights", True):
        return None
    if any(arguments.get(name) not in (None, False) for name in _UNKNOWN_SETTINGS):
        return None
    return None if any(arguments.get(name) is not None for name in _UNKNOWN_TENSORS) else arguments


def attend_multi_head(arguments: Mapping[str, Any], attention: Any) -> tuple[Tensor, None]:
    """Return what such a call does, (tokens, samples, width), by `attention`, which takes the arguments of
    `scaled_dot_product_attention`."""
    query, heads = arguments["query"], arguments["num_heads"]
    length, samples, width = query.shape
    packed = _packed_projections(
        query, arguments["key"], arguments["value"], arguments["in_proj_weight"], arguments["in_proj_bias"]
    )

    def of_heads(projected: Tensor) -> Tensor:
        tokens = projected.shape[0]
        # (tokens, samples, width) → (samples, heads, tokens, width / heads).
        return projected.view(tokens, samples * heads, -1).transpose(0, 1).view(samples, heads, tokens, -1)

    causal = bool(arguments.get("is_causal")) and arguments.get("key_padding_mask") is None
    mask = (
        None if causal else _merged_mask(arguments.get("attn_mask"), arguments.get("key_padding_mask"), samples, heads)
    )
    rate = arguments["dropout_p"] if arguments.get("training", True) else 0.0
    mixed = attention(*map(of_heads, packed), attn_mask=mask, dropout_p=rate, is_causal=causal)
    flat = mixed.permute(2, 0, 1, 3).contiguous().view(samples * length, width)
    return F.linear(flat, arguments["out_proj_weight"], arguments["out_proj_bias"]).view(length, samples, width), None


def _packed_projections(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> Sequence[Tensor]:
    """Query, key and value of one matrix: one product, then a copy that parts them; or a product each."""
    if query is key and key is value:
        whole = F.linear(query, weight, bias).unflatten(-1, (3, query.shape[-1]))
        return whole.movedim(-2, 0).contiguous().unbind(0)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)]


def _merged_mask(mask: Tensor | None, padding: Tensor | None, samples: int, heads: int) -> Tensor | None:
    """Return the mask that attention adds to its scores, merged from one of (queries, keys) or (samples · heads or 1,
    queries, keys) and one of padding, (samples, keys). torch's module has made numbers of both."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.unflatten(0, (samples, heads))
    if padding is None:
        return mask
    beside = padding[:, None, None, :]
    return beside if mask is None else mask + beside
