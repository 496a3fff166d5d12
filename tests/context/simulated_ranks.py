"""Ranks that share a sequence, one after another in this process: all of their attention but what they send."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.comm import GroupView
from weft.parallel.local_tokens import LocalTokens
from weft.techniques.context.attention import VisitedAttention
from weft.techniques.context.exchange import Gradients
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.shares import Shown

Three = tuple[Tensor, Tensor, Tensor]


class Board:
    """Shows one rank what all show, and keeps what it says of the others."""

    def __init__(self, index: int, key: Tensor, value: Tensor) -> None:
        self.index, self.key, self.value = index, key, value
        self.by_key, self.by_value = torch.zeros_like(key), torch.zeros_like(value)

    def visit(self, key: Tensor, value: Tensor, shown: Shown) -> Iterator[tuple[int, Tensor, Tensor]]:
        for source in range(shown.ranks):
            places = self.places(shown, source)
            yield source, self.key[:, :, places], self.value[:, :, places]

    def gradients(self, key: Tensor, value: Tensor, shown: Shown, compute: Gradients) -> tuple[Tensor, Tensor]:
        """By two parts of the heads, as a ring does it with some."""
        heads = key.shape[1]
        for source, keys, values in self.visit(key, value, shown):
            for part in (slice(0, (heads + 1) // 2), slice((heads + 1) // 2, heads)):
                if part.start < part.stop:
                    said = compute(source, keys[:, part], values[:, part], part)
                    places = self.places(shown, source)
                    for whole, found in zip((self.by_key, self.by_value), said, strict=True):
                        here = whole[:, part]
                        here[:, :, places] += found
        return torch.zeros_like(key), torch.zeros_like(value)

    def places(self, shown: Shown, source: int) -> Tensor:
        runs = shown.every(source) if source == self.index else shown.of(source)
        return torch.cat([torch.arange(start, stop) for start, stop in runs])


def shared_among(
    ranks: int, operands: Three, gradient: Tensor, form: AttentionForm, documents: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of whole samples and the gradients of queries, keys and values, as the ranks find them."""
    length = operands[0].shape[2]
    mixed, sums = torch.zeros_like(gradient), [torch.zeros_like(operand) for operand in operands]
    for index in range(ranks):
        shown = Shown(length, ranks, form.window)
        board = Board(index, *operands[1:])
        places = board.places(shown, index)
        own = [operand[:, :, places].clone().requires_grad_() for operand in operands]
        attend = VisitedAttention(GroupView(tuple(range(ranks)), index, None), board)
        tokens = LocalTokens(length=length, runs=shown.every(index), documents=documents)
        found = attend(own[0], own[1], own[2], tokens, form)
        found.backward(gradient[:, :, places])
        mixed[:, :, places] = found.detach()
        assert own[0].grad is not None
        sums[0][:, :, places] = own[0].grad
        sums[1] += board.by_key
        sums[2] += board.by_value
    return mixed, sums
