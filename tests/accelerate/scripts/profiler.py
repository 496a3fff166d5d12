"""Profiles steps, and writes a trace."""

import os

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, ProfileKwargs


def main():
    kwargs = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir="traces")
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.profile() as profiler:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.gather(loss.detach()).mean().item()!r}")
    accelerator.print(len(profiler.key_averages()) > 5, "profile_0.json" in os.listdir("traces"))


main()
