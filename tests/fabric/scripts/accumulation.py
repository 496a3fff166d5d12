"""Three batches to a step; nothing is reduced before the last of them."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(11)
    points = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(points, points.sin().sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    every, losses = 3, []
    for _ in range(2):
        for iteration, (inputs, targets) in enumerate(loader):
            is_accumulating = (iteration + 1) % every != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = F.mse_loss(model(inputs), targets)
                fabric.backward(loss / every)
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
    return losses
