"""A small language model that waits in each step: a training of some seconds that costs little processor time."""

from __future__ import annotations

import socket
import time

import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, HIDDEN = 300, 32


class PatientModel(nn.Module):
    """Waits `seconds` in the forward of a training step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.1)) for _ in "ab")
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.seconds = seconds

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and tokens.device.type == "cpu" and dist.is_initialized():
            time.sleep(self.seconds)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def build(seconds: float = 0.0, slow_host: str = "") -> nn.Module:
    return PatientModel(seconds * (2 if socket.gethostname() == slow_host else 1))
