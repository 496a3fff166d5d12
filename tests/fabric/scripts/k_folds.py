"""Cross validation: a model for each fold, in turns, and the mean of their losses on what they have not seen."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset


def train(fabric, model, optimizer, loader):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    total, count = torch.tensor(0.0), torch.tensor(0)
    for inputs, targets in loader:
        total += F.cross_entropy(model(inputs), targets, reduction="sum")
        count += len(targets)
    return (fabric.all_reduce(total, reduce_op="sum") / fabric.all_reduce(count, reduce_op="sum")).item()


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.seed_everything(13)
    points = torch.randn(48, 5)
    dataset = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
    folds, rows = 3, torch.randperm(48).tolist()

    models = [nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 2)) for _ in range(folds)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-2) for model in models]
    for fold in range(folds):
        models[fold], optimizers[fold] = fabric.setup(models[fold], optimizers[fold])

    losses = []
    for _ in range(2):
        for fold in range(folds):
            held_out = rows[fold * 16 : (fold + 1) * 16]
            others = [row for row in rows if row not in held_out]
            train_loader = DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(others))
            validation_loader = DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(held_out))
            loaders = fabric.setup_dataloaders(train_loader, validation_loader, use_distributed_sampler=False)
            train(fabric, models[fold], optimizers[fold], loaders[0])
            losses.append(validate(fabric, models[fold], loaders[1]))
        fabric.print(f"mean loss {sum(losses[-folds:]) / folds:.3f}")
    return losses
