"""A classifier of points with a schedule and clipped gradients. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def load_data() -> TensorDataset:
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
