"""Stops on every process when one has seen a loss that is small enough."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(10):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            shown = accelerator.gather(loss.detach()).mean().item()
            accelerator.print(f"epoch {epoch} loss {shown!r}")
            if accelerator.is_main_process and shown < 0.02:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        else:
            continue
        accelerator.print(f"stopped in epoch {epoch}")
        break


main()
