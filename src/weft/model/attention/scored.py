"""Attention as models write it out alone, as one call: with biases, a cap, sinks, and dropout by a function
(`written.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.model.attention.dropping import band_of


class DrawnDropout(nn.Module):
    """Dropout that a model calls as a function, as a module: what shares attention keys it as it keys draws."""

    def __init__(self, rate: float, draw: object = None) -> None:
        """`draw`: what says which probabilities are dropped where nobody computes all of them; None: nothing does."""
        super().__init__()
        self.rate, self.draw = rate, draw

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.rate)


def attend_scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: nn.Module | None,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention (samples, heads, tokens, value size) that does more to its scores than to scale and mask them.

    Operands are those of `attend_dropping`; with a `window` it is causal.  A compiler does not follow it.  `softcap`:
    scores s become softcap · tanh(s / softcap) (Gemma 2, https://arxiv.org/abs/2408.00118).  `bias`, (heads or 1,
    queries or 1, keys or 1), of places alone, is added then.  `sinks`, (heads,), are scores that take part in the
    softmax of every query and attend to nothing (Xiao et al. 2023, https://arxiv.org/abs/2309.17453).
    """
    given = (query, key, value)
    if has_torch_function(given):
        return handle_torch_function(
            attend_scored, given, query, key, value, bias, dropout, causal=causal, window=window, scale=scale,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
    queries, keys = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    if causal:
        seen = band_of(queries, keys, keys if window is None else window, query.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.softmax(-1, dtype=wide)[..., :keys].to(query.dtype)
    return (probabilities if dropout is None else dropout(probabilities)) @ value
