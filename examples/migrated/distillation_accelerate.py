"""A small model learns what a larger one says. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


def build_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def load_data() -> TensorDataset:
    return TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    teacher, model = build_model(64).requires_grad_(False), build_model(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for (points,) in loader:
            loss = F.kl_div(model(points).log_softmax(1), teacher(points).softmax(1), reduction="batchmean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
