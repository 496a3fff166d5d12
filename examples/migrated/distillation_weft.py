"""A small model learns what a larger one says. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def build_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def load_data() -> TensorDataset:
    return TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(1)))


def main(session: weft.Session):
    torch.manual_seed(0)
    teacher, model = build_model(64).requires_grad_(False), build_model(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)

    def loss_fn(logits, batch):
        return F.kl_div(logits.log_softmax(1), teacher(batch[0]).softmax(1), reduction="sum"), len(logits)

    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    losses = []
    for _ in range(3):
        for batch in state.batches():
            losses.append(state.step(batch).loss)
    session.print(json.dumps(losses))


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
