"""Training that is left in the middle of an epoch; the next run finds its checkpoint, and goes on."""

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RUNS, EPOCHS, STOP = 2, 3, 7


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(29)
    points = torch.randn(40, 4)
    dataset = TensorDataset(points, points.cos().sum(1, keepdim=True))
    order = torch.Generator()
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True, generator=order))

    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "steps": 0, "seen": torch.zeros(2)}

    losses, checkpoint = [], Path("run", "checkpoint.ckpt")
    resumes = checkpoint.exists()
    fabric.barrier()
    if resumes:
        assert fabric.load(checkpoint, state) == {}
        losses += [state["steps"], *state["seen"].tolist()]
    first_epoch, first_batch = divmod(state["steps"], len(loader))
    for epoch in range(first_epoch, EPOCHS):
        order.manual_seed(100 + epoch)
        for number, (inputs, targets) in enumerate(loader):
            if epoch == first_epoch and number < first_batch:
                continue
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(fabric.all_reduce(loss.detach()).item())
            state["steps"] += 1
            state["seen"] += torch.tensor([1, epoch])
            if state["steps"] == STOP and not resumes:
                checkpoint.parent.mkdir(exist_ok=True)
                fabric.save(checkpoint, state)
                return losses
    return losses
