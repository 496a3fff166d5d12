"""Low-rank adapters beside frozen layers. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features) + features @ self.down.T @ self.up.T


def build_model() -> nn.Module:
    return nn.Sequential(Adapted(nn.Linear(8, 32), 2), nn.ReLU(), Adapted(nn.Linear(32, 4), 2))


def load_data() -> TensorDataset:
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
