"""Factories of `test_bad_input.py`: what a user may get wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Poisoned(nn.Module):
    """A language model whose forward does one wrong thing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.how = how
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "raise" and dist.get_rank() == 1 and self.calls == 2:
            raise ValueError("a width of 7 was not expected")
        if self.how == "range":
            tokens = tokens + 50
        logits = self.head(self.embedding(tokens))
        return logits * torch.nan if self.how == "nan" else logits


def poisoned(how: str) -> nn.Module:
    return Poisoned(how)


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise ValueError("no such width")


def linear(width: int = 4) -> nn.Module:
    return nn.Linear(width, 2)
