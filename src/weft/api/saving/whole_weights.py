"""A model whose parts ranks hold, put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.techniques.core import NestedSplit, Piece


def whole_weights(pieces: Sequence[Piece], tell: Callable[[Any], list[Any]]) -> dict[str, Tensor]:
    """Return parameters and buffers of a model by name, on the CPU.  Call on every rank.

    Args:
        pieces: what this rank holds.
        tell: returns what every rank has given it.
    """
    own: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.counts and piece.addend is None:
            own[piece.name].append(piece)
    names = sorted({name for each in tell(sorted(own)) for name in each})
    return {name.partition("/")[2]: _joined(own.get(name, []), tell) for name in names}


def _joined(pieces: Sequence[Piece], tell: Callable[[Any], list[Any]]) -> Tensor:
    """One tensor at a time: a rank needs memory for the whole model once."""
    told = [[list(each.shape), each.split.numbers, each.start, each.tensor.detach()] for each in pieces]
    runs = [run for of_rank in tell(told) for run in of_rank]
    for each in pieces:
        if each.let_go is not None:
            each.let_go()
    shape, split = torch.Size(runs[0][0]), NestedSplit.of_numbers(runs[0][1])
    local = split.local_shape(shape)
    parts = [torch.empty(local.numel(), dtype=runs[0][3].dtype) for _ in range(split.parts)]
    for _, numbers, start, held in runs:
        parts[NestedSplit.of_numbers(numbers).index][start : start + held.numel()] = held.cpu()
    return split.join([part.view(local) for part in parts])
