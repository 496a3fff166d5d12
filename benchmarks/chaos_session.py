"""A script with a loop of its own, whose runs `weft chaos` disturbs for `make chaos`: 24 steps, a save every four."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(62, 8), torch.randint(0, 4, (62,)))
loader = DataLoader(data, batch_size=8, shuffle=True)  # eight steps in an epoch, the last of which runs on

with weft.session(ledger=True) as session:
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    state.attach(schedule=schedule)
    for epoch in state.epochs(3):
        for batch in epoch:
            if state.step(batch).step % 4 == 0:
                state.save()
        schedule.step()
