"""Accumulation by hand: the loop divides the loss, and keeps gradients from being synchronised in between."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    set_seed(3)
    steps = 2
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=draw)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader):
            if (number + 1) % steps:
                with accelerator.no_sync(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets) / steps
                    accelerator.backward(loss)
            else:
                loss = nn.functional.cross_entropy(model(inputs), targets) / steps
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item()!r}")


main()
