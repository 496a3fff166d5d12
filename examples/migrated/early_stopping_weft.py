"""Training ends when the loss on held-out points has not fallen for two epochs. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def load_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator))


def main(session: weft.Session):
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, held_out = DataLoader(load_data(1), batch_size=8), DataLoader(load_data(2), batch_size=8)
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    losses, best, patience = [], float("inf"), 2
    for _ in range(20):
        for batch in state.batches():
            state.step(batch)
        losses.append(state.evaluate(held_out))
        patience = 2 if losses[-1] < best else patience - 1
        best = min(best, losses[-1])
        if patience == 0:
            break
    session.print(json.dumps(losses))


def loss_fn(logits, batch):
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
