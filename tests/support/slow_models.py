"""A small language model that waits in each step, or that keeps what it has computed."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

_VOCABULARY, _HIDDEN = 300, 32


class SlowModel(nn.Module):
    """Waits in the forward of a training step as for an accelerator, and on one rank never lets its outputs go."""

    def __init__(self, seconds: float, leak_bytes: int, leaking_rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh()) for _ in "abcd")
        self.head = nn.Linear(_HIDDEN, _VOCABULARY)
        self.seconds, self.leak_bytes, self.leaking_rank = seconds, leak_bytes, leaking_rank
        self.kept: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and tokens.device.type == "cpu" and dist.is_initialized():
            time.sleep(self.seconds)
            if self.leak_bytes and dist.get_rank() == self.leaking_rank:
                self.kept.append(torch.ones(self.leak_bytes // 4))
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def slow(seconds: float = 0.0, leak_bytes: int = 0, leaking_rank: int = 0) -> nn.Module:
    return SlowModel(seconds, leak_bytes, leaking_rank)
