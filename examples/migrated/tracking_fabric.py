"""Losses go to a tracker, step by step. In Lightning Fabric's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.fabric import Fabric
from weft.fabric.loggers import CSVLogger


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def load_data() -> TensorDataset:
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sum(1, keepdim=True))


def main():
    torch.manual_seed(0)
    tracker = CSVLogger("runs")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=tracker)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for step, (points, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), targets)
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", fabric.all_reduce(loss.detach()).item(), step)
    fabric.print(json.dumps([row["loss"] for row in tracker.experiment.metrics]))


if __name__ == "__main__":
    main()
