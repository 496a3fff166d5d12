"""Places of tokens: beside padding, and in buffers that on the meta device have no values."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def places_beside_padding(tokens: Tensor, padding_token: int) -> Tensor:
    """Return places of whole samples of (samples, tokens) as RoBERTa counts them: the padding token stands at its own
    number, and all others are counted from there on.

    Source: fairseq, `utils.make_positions`, whose tables of places leave the row of the padding token free.
    """
    counted = tokens.ne(padding_token)
    return counted.cumsum(1) * counted + padding_token


def count_places(module: nn.Module) -> None:
    """Give buffers of places the values that they have in transformers, 0, 1, …, for there are none on the meta
    device."""
    for name, buffer in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf == "position_ids" and buffer.is_meta and buffer.dtype == torch.int64 and buffer.dim() in (1, 2):
            setattr(module.get_submodule(owner), leaf, torch.arange(buffer.shape[-1]).expand(buffer.shape))
