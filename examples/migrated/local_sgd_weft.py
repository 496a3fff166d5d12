"""A classifier whose processes step by themselves, and average their weights every four steps. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def load_data() -> TensorDataset:
    points = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


def main():
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    losses = []
    with weft.session(local_steps=4, quiet=True, record=False) as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        for _ in range(2):
            for batch in state.batches():
                losses.append(state.step(batch).loss)
    with torch.no_grad():
        points, labels = load_data().tensors
        losses.append(F.cross_entropy(model(points), labels).item())
    session.print(json.dumps(losses))


def loss_fn(logits, batch):
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


if __name__ == "__main__":
    main()
