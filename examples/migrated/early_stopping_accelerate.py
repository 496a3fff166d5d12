"""Training ends when the loss on held-out points has not fallen for two epochs. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def load_data(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, held_out = DataLoader(load_data(1), batch_size=8), DataLoader(load_data(2), batch_size=8)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    losses, best, patience = [], float("inf"), 2
    for _ in range(20):
        for points, labels in loader:
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found = [accelerator.gather(F.cross_entropy(model(points), labels)).mean() for points, labels in held_out]
        losses.append(sum(found).item() / len(found))
        patience = 2 if losses[-1] < best else patience - 1
        best = min(best, losses[-1])
        if patience == 0:
            break
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
