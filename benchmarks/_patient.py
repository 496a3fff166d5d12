"""A model whose training steps last a given time, as where a device computes: `goodput` trains it."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY = 300


class Patient(nn.Module):
    """Linear blocks over tokens; the forward of a training step waits `seconds`."""

    def __init__(self, seconds: float, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)
        self.seconds = seconds

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of (batch, length, VOCABULARY)."""
        if self.training and tokens.device.type == "cpu" and dist.is_initialized():
            time.sleep(self.seconds)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def build(seconds: float, width: int, blocks: int) -> nn.Module:
    return Patient(seconds, width, blocks)
