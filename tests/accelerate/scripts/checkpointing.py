"""Saves within a pass, and goes on from one with other weights and another order in the meantime."""

import os

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


class Counter:
    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def things(accelerator):
    set_seed(11)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(42, 6, generator=draw)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = CosineAnnealingLR(optimizer, T_max=12)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def main():
    project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model, optimizer, loader, scheduler = things(accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for _ in range(2):
        for batch in loader:
            step(accelerator, model, optimizer, scheduler, batch)
            counter.seen += 1
            if counter.seen == 8:
                middle = accelerator.save_state("middle")
        accelerator.save_state()
    accelerator.print(sorted(os.listdir("project/checkpoints")), f"seen {float(counter.seen)!r}")
    accelerator.load_state("middle" if middle is None else middle)
    accelerator.print(f"seen {float(counter.seen)!r}")
    epoch, done = divmod(counter.seen, len(loader))
    rest = accelerator.skip_first_batches(loader, done)
    for batch in rest:
        step(accelerator, model, optimizer, scheduler, batch)
    accelerator.save_model(model, "exported")
    accelerator.print(sorted(os.listdir("exported")))


def step(accelerator, model, optimizer, scheduler, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    shown = accelerator.gather_for_metrics(loss.detach().repeat(8)).mean()
    accelerator.print(f"loss {shown.item():.6f} rate {scheduler.get_last_lr()[0]:.8f}")


main()
