"""Losses go to a tracker, step by step. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def load_data() -> TensorDataset:
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sum(1, keepdim=True))


def main(session: weft.Session):
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    for batch in state.batches():
        state.step(batch)
    session.print(json.dumps(TRACKED))


def loss_fn(found, batch):
    return F.mse_loss(found, batch[1], reduction="sum"), len(found)


TRACKED: list[float] = []


def track(name: str, value: float, step: int) -> None:
    if name == "train/loss":
        TRACKED.append(value)


if __name__ == "__main__":
    with weft.session(track=track, quiet=True, record=False) as session:
        main(session)
