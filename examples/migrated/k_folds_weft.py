"""Three folds: a model for each, and its loss on what it has not seen. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import weft


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def load_data() -> TensorDataset:
    points = torch.randn(72, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.sum(1, keepdim=True))


def folds() -> list[tuple[list[int], list[int]]]:
    return [([i for i in range(72) if i % 3 != fold], [i for i in range(72) if i % 3 == fold]) for fold in range(3)]


def main(session: weft.Session):
    data, losses = load_data(), []
    for train, held_out in folds():
        torch.manual_seed(0)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(Subset(data, train), batch_size=8)
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        for batch in state.batches():
            losses.append(state.step(batch).loss)
        losses.append(state.evaluate(DataLoader(Subset(data, held_out), batch_size=8)))
    session.print(json.dumps(losses))


def loss_fn(found, batch):
    return F.mse_loss(found, batch[1], reduction="sum"), len(found)


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
