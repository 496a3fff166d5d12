"""Accumulation over four microbatches, under torch's profiler. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def load_data() -> TensorDataset:
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sum(1, keepdim=True))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, parts = [], []
    with accelerator.profile() as profiler:
        for points, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(points), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                parts.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                losses.append(sum(parts) / len(parts))
                parts = []
    assert profiler.key_averages()
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
