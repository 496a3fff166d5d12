"""Attention as models write it out alone, as one call: with biases, and with dropout by a function (`written.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.models.dropping import attend_in_parts, band_of


class DrawnDropout(nn.Module):
    """Dropout that a model calls as a function, as a module: what shares attention keys it as it keys draws."""

    def __init__(self, rate: float, draw: object = None) -> None:
        """`draw`: what says which probabilities are dropped where nobody computes all of them; None: nothing does."""
        super().__init__()
        self.rate, self.draw = rate, draw

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.rate)


def attend_biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout: nn.Module | None,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention (samples, heads, tokens, value size) to whose scores `bias` is added: (heads or 1, queries or 1,
    keys or 1), of places alone.

    Operands are those of `attend_dropping`; with a `window` it is causal.  A compiler does not follow it.
    """
    given = (query, key, value)
    if has_torch_function(given):
        return handle_torch_function(
            attend_biased, given, query, key, value, bias, dropout, causal=causal, window=window, scale=scale
        )
    queries, keys = query.shape[2], key.shape[2]
    mask = bias[None].to(query.dtype)
    if causal:
        seen = band_of(queries, keys, keys if window is None else window, query.device)
        mask = mask.expand(1, -1, queries, keys).masked_fill(~seen, -torch.inf)
    if dropout is not None:
        return attend_in_parts(query, key, value, mask, dropout, causal=causal, scale=scale)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, mask.expand(1, -1, queries, keys), scale=scale)
