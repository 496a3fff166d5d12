"""A classifier whose processes step by themselves, and average their weights every four steps. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator
from weft.accelerate.local_sgd import LocalSGD
from weft.accelerate.utils import DataLoaderConfiguration


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def load_data() -> TensorDataset:
    points = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
        for _ in range(2):
            for points, labels in loader:
                loss = F.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
    with torch.no_grad():
        points, labels = load_data().tensors
        losses.append(F.cross_entropy(model(points), labels).item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
