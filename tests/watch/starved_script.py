"""A session's loop whose samples take long to come: `starved_script.py SECONDS STEPS`."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft

SECONDS, STEPS = float(sys.argv[1]), int(sys.argv[2])
BATCH = 8


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """Samples from a storage that takes its time for each."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(SECONDS)
        return torch.full((64,), float(index % 10)), index % 10


def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with weft.session() as session:
        loader = DataLoader(SlowSamples(), batch_size=BATCH)
        state = session.prepare(model, optimizer, loader, loss=loss)
        for batch in state.batches():
            state.step(batch)


main()
