"""Accumulation over four microbatches, under torch's profiler. For Weft."""

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
    losses = []
    with torch.profiler.profile() as profiler:
        for batch in state.batches():
            losses.append(state.step(batch).loss)
    assert profiler.key_averages()
    session.print(json.dumps(losses))


def loss_fn(found, batch):
    return F.mse_loss(found, batch[1], reduction="sum"), len(found)


if __name__ == "__main__":
    with weft.session(accumulate=4, quiet=True, record=False) as session:
        main(session)
