"""Attention that drops some of its probabilities, or sees through a window, as one call: what shares, follows or prices
attention sees it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function


class AttentionTaker(TorchFunctionMode):
    """A mode that takes calls of the functions below, as of torch's own, when they are compiled, too."""


class PendingScores(Tensor):
    """Scores of attention that a model writes out and nobody computes (`written.py`)."""

    def dropped_by(self, dropout: nn.Module) -> PendingScores:
        """Return what a module for dropout makes of them, where they are probabilities."""
        raise NotImplementedError


def _taken(function: Any, *operands: Any, **settings: Any) -> Tensor | None:
    """Return what a mode makes of a call that a compiler follows, which asks modes about torch's own functions alone;
    None: no mode takes it."""
    if not torch.compiler.is_compiling():
        return None
    for index in range(torch._C._len_torch_function_stack()):  # pyright: ignore[reportPrivateUsage]
        mode = torch._C._get_function_stack_at(index)  # pyright: ignore[reportPrivateUsage]
        if isinstance(mode, AttentionTaker):
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] # torch leaves it then, too
                return mode.__torch_function__(function, (), operands, settings)
    return None


def attend_dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: nn.Module,
    *,
    causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Return attention (samples, heads, queries, value size) whose probabilities go through `dropout`.

    Query is (samples, heads, queries, size), key and value (samples, kv heads, keys, size), kv heads dividing heads.
    `mask`: of bool, what is seen, or of floats, what is added to the scores; without one attention is `causal` or sees
    every key.  `dropout` is a module, so that a plan can key its draws by sample and layer.
    """
    given = (query, key, value)
    if (taken := _taken(attend_dropping, *given, mask, dropout, causal=causal, scale=scale)) is not None:
        return taken
    if has_torch_function(given):
        return handle_torch_function(
            attend_dropping, given, query, key, value, mask, dropout, causal=causal, scale=scale
        )
    return attend_in_parts(query, key, value, mask, dropout, causal=causal, scale=scale)


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Module, *, causal: bool,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the same, as what it is made of: products, a softmax and the dropout."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and causal and scores.shape[-2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    # Softmax in fp32 under bf16 and fp16, as the fused kernel does.
    wide = torch.promote_types(scores.dtype, torch.float32)
    return dropout(scores.softmax(-1, dtype=wide).to(scores.dtype)) @ value


def attend_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: nn.Module | None,
    *,
    window: int,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention (samples, heads, queries, value size) of which each query sees the `window` latest keys,
    its own among them.

    Operands are those of `attend_dropping`; the last query stands where the last key does.  A `mask` is what is seen,
    or what is added to the scores, the window among it: it goes then.  `dropout`: None where nothing is dropped.
    """
    given = (query, key, value)
    if (taken := _taken(attend_in_window, *given, mask, dropout, window=window, scale=scale)) is not None:
        return taken
    if has_torch_function(given):
        return handle_torch_function(
            attend_in_window, given, query, key, value, mask, dropout, window=window, scale=scale
        )
    return attend_with_band(query, key, value, mask, dropout, window=window, scale=scale)


def attend_with_band(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Module | None, *, window: int,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the same, with the window as a mask where there is none."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and keys > window:
        mask = band_of(queries, keys, window, query.device)
    if dropout is not None:
        return attend_in_parts(query, key, value, mask, dropout, causal=True, scale=scale)
    if mask is not None and (groups := query.shape[1] // key.shape[1]) > 1:
        # With a mask most kernels want as many heads of keys.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None and queries > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def band_of(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees, bool (1, 1, queries, keys)."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return (every.tril(keys - queries) & every.triu(keys - queries - window + 1))[None, None]


ATTENTION = (F.scaled_dot_product_attention, attend_dropping, attend_in_window)
"""Functions that attend; and `scored.attend_scored` does."""
