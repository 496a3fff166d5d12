"""A session's loop on every rank, one of which is slow in one phase: `slow_script.py RANK PHASE SECONDS STEPS [FILE]`.

A file that has `RANK PHASE SECONDS` takes the place of the first three words.  It is read before each step, so that
another rank may be slow from then on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import weft

WORDS, STEPS, FILE = sys.argv[1:4], int(sys.argv[4]), sys.argv[5:]
PAUSES = dict.fromkeys(("data_wait", "forward", "backward", "optimizer"), 0.0)
"""Seconds for which this rank sleeps in each phase of the step."""


class Waits(torch.autograd.Function):
    """Sleeps in the forward or in the backward, on this rank alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        time.sleep(PAUSES["forward"])
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(PAUSES["backward"])
        return gradients[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Waits.apply(torch.relu(self.first(x))))


def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def collate(samples: list[Any]) -> Any:
    time.sleep(PAUSES["data_wait"])
    return default_collate(samples)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with weft.session() as session:

        def read_pauses() -> None:
            rank, phase, seconds = Path(FILE[0]).read_text().split() if FILE else WORDS
            PAUSES.update(dict.fromkeys(PAUSES, 0.0))
            PAUSES[phase] = float(seconds) if int(rank) == session.rank else 0.0

        read_pauses()
        loader = DataLoader(data, batch_size=32, collate_fn=collate)
        state = session.prepare(model, optimizer, loader, loss=loss)
        optimizer.register_step_pre_hook(lambda *_: time.sleep(PAUSES["optimizer"]))
        for _ in range(STEPS // 20):
            for batch in state.batches():
                state.step(batch)
                read_pauses()


main()
