"""A convolutional network with batch norm, on images flipped and shifted by their number. In Lightning Fabric's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from weft.fabric import Fabric


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


def main():
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Images(), batch_size=16)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    losses = []
    for _ in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            losses.append(fabric.all_reduce(loss.detach()).item())
    fabric.print(json.dumps(losses))


if __name__ == "__main__":
    main()
