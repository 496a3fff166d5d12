"""Gradients clipped by their norm in the first epoch, and by value in the second."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(3, 12, batch_first=True)
        self.head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.seed_everything(5)
    series = torch.randn(40, 7, 3).cumsum(1)
    loader = DataLoader(TensorDataset(series[:, :-1], series[:, -1].sum(1, keepdim=True)), batch_size=8)
    model = fabric.setup_module(Recurrent())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(loader)

    seen = []
    for epoch in range(2):
        for inputs, targets in loader:
            loss = F.l1_loss(model(inputs), targets)
            fabric.backward(loss)
            if epoch == 0:
                seen.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            else:
                fabric.clip_gradients(model, optimizer, clip_val=0.02)
                seen.append(fabric.all_reduce(loss.detach()).item())
            optimizer.step()
            optimizer.zero_grad()
    return seen
