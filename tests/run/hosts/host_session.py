"""A script with a session, for the tests of several hosts: it splits as Weft chooses, waits in each step, and leaves as
it is asked.  A step costs little processor time."""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--at", type=int, default=0)
asked = parser.parse_args()


def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(240, 8), torch.randint(0, 4, (240,)))
loader = DataLoader(data, batch_size=12, shuffle=True)  # twenty steps in an epoch
with weft.session(plan="auto", prove="never") as session:
    state = session.prepare(model, optimizer, loader, loss=loss)
    for epoch in state.epochs(asked.epochs):
        for batch in epoch:
            step = state.step(batch).step
            time.sleep(asked.pause)
            if step == 2:
                state.save()
            if step == asked.at and session.rank == session.world_size - 1:
                sys.exit(asked.exit)
