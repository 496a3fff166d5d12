"""A schedule over a given number of steps, which the script multiplies by the processes that step it."""

from functools import partial

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def linear(step, *, num_warmup_steps, num_training_steps):
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def main():
    accelerator = Accelerator()
    set_seed(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    warmup, steps = 2, 8
    schedule = LambdaLR(
        optimizer,
        partial(
            linear,
            num_warmup_steps=warmup * accelerator.num_processes,
            num_training_steps=steps * accelerator.num_processes,
        ),
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    other = CosineAnnealingLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), accelerator.num_processes * steps)
    other = accelerator.prepare(other)
    accelerator.print(f"total batch size {8 * accelerator.num_processes > 0} rate {float(other.scheduler.T_max)!r}")
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        shown = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"loss {shown:.6f} rate {schedule.get_last_lr()[0]!r}")


main()
