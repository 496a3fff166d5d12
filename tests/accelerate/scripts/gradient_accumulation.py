"""Automatic accumulation: the last batches of a pass make up a step of their own."""

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def main():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    set_seed(7)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=draw)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            shown = accelerator.reduce(loss.detach(), reduction="mean")
            rate = scheduler.get_last_lr()[0]
            accelerator.print(f"loss {shown.item():.6f} rate {rate!r} {accelerator.sync_gradients}")
    accelerator.end_training()


main()
