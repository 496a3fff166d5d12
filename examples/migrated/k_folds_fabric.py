"""Three folds: a model for each, and its loss on what it has not seen. In Lightning Fabric's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from weft.fabric import Fabric


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def load_data() -> TensorDataset:
    points = torch.randn(72, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sum(1, keepdim=True))


def folds() -> list[tuple[list[int], list[int]]]:
    return [([i for i in range(72) if i % 3 != fold], [i for i in range(72) if i % 3 == fold]) for fold in range(3)]


def main():
    fabric = Fabric(accelerator="cpu", devices=1)
    data, losses = load_data(), []
    for train, held_out in folds():
        torch.manual_seed(0)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(Subset(data, train), batch_size=8)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for points, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(points), targets)
            fabric.backward(loss)
            optimizer.step()
            losses.append(fabric.all_reduce(loss.detach()).item())
        points, targets = data[held_out]
        with torch.no_grad():
            losses.append(F.mse_loss(model(points), targets).item())
    fabric.print(json.dumps(losses))


if __name__ == "__main__":
    main()
