"""Places of tokens where a padding token stands at none."""

from __future__ import annotations

from torch import Tensor


def places_beside_padding(tokens: Tensor, padding_token: int) -> Tensor:
    """Return places of whole samples of (samples, tokens) as RoBERTa counts them: the padding token stands at its own
    number, and all others are counted from there on.

    Source: fairseq, `utils.make_positions`, whose tables of places leave the row of the padding token free.
    """
    counted = tokens.ne(padding_token)
    return counted.cumsum(1) * counted + padding_token
