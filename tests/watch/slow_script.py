"""A session's loop on every rank, one of which is slow in one phase: `slow_script.py RANK PHASE SECONDS STEPS`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft

RANK, PHASE, SECONDS, STEPS = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])


class Waits(torch.autograd.Function):
    """Sleeps in the forward or in the backward, on this rank alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)
        self.forward_seconds = self.backward_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.forward_seconds or self.backward_seconds:
            hidden = Waits.apply(hidden, self.forward_seconds, self.backward_seconds)
        return self.second(hidden)


def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with weft.session() as session:
        state = session.prepare(model, optimizer, DataLoader(data, batch_size=32), loss=loss)
        is_slow = session.rank == RANK
        model.forward_seconds = SECONDS if is_slow and PHASE == "forward" else 0.0
        model.backward_seconds = SECONDS if is_slow and PHASE == "backward" else 0.0
        if is_slow and PHASE == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: time.sleep(SECONDS))
        for _ in range(STEPS // 20):
            for batch in state.batches():
                state.step(batch)


main()
