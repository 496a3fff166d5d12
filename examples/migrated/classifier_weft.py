"""A classifier of points with a schedule and clipped gradients. For Weft."""

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
    points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :4].argmax(1))


def main(session: weft.Session):
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loader = DataLoader(load_data(), batch_size=16)
    state = session.prepare(model, optimizer, loader, loss=loss_fn, max_grad_norm=0.5)
    losses = []
    for _ in range(2):
        for batch in state.batches():
            losses.append(state.step(batch).loss)
            schedule.step()
    session.print(json.dumps(losses))


def loss_fn(logits, batch):
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
