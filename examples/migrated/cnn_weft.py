"""A convolutional network with batch norm, on images flipped and shifted by their number. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        label = index % 4
        image = torch.randn(1, 8, 8, generator=draw) + label
        image = image.flip(2) if torch.rand((), generator=draw) < 0.5 else image
        return image.roll(int(torch.randint(0, 3, (), generator=draw)), 1), label


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def main(session: weft.Session):
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Images(), batch_size=16)
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    losses = []
    for _ in range(3):
        for batch in state.batches():
            losses.append(state.step(batch).loss)
    session.print(json.dumps(losses))


def loss_fn(logits: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
