"""Callbacks that hear of a loop, and a logger that keeps its numbers."""

import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from lightning_fabric.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Best:
    def __init__(self):
        self.loss, self.steps, self.names = float("inf"), 0, []

    def on_after_setup(self, fabric, module):
        self.names = [name for name, _ in module.named_parameters()]

    def on_after_optimizer_step(self, strategy, optimizer):
        self.steps += 1

    def on_train_epoch_end(self, loss):
        self.loss = min(self.loss, loss)


class Announcing:
    @rank_zero_only
    def on_train_epoch_end(self, epoch, loss):
        print(f"epoch {epoch}: {loss:.3f}")


def main(**options):
    best, logger = Best(), CSVLogger("logs", name="ridge", flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", callbacks=[best, Announcing()], loggers=logger, **options)
    fabric.launch()
    fabric.seed_everything(23, verbose=False)
    points = torch.randn(40, 4)
    loader = DataLoader(TensorDataset(points, points @ torch.arange(4.0).to(points)[:, None]), batch_size=8)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    step = 0
    for epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            loss = fabric.all_reduce(loss.detach())
            fabric.log_dict({"loss": loss, "rate": optimizer.param_groups[0]["lr"]}, step=step)
            step += 1
        fabric.call("on_train_epoch_end", epoch=epoch, loss=loss.item())
    fabric.log("best", best.loss, step)
    logger.finalize("success")
    fabric.barrier()
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [best.loss, best.steps, len(best.names), len(rows), *(float(row["loss"]) for row in rows if row["loss"])]
