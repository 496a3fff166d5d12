"""A generator of points on a ring against a critic: two models, two optimizers. In Lightning Fabric's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.fabric import Fabric


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(real), self.layers(fake)


def build_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))


def load_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    angles = 6.28 * torch.rand(128, generator=generator)
    return TensorDataset(torch.randn(128, 4, generator=generator), torch.stack([angles.cos(), angles.sin()], 1))


def main():
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    making, judging = build_generator(), Critic()
    making_step = torch.optim.Adam(making.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judging_step = torch.optim.Adam(judging.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(load_data(), batch_size=16)
    making, making_step = fabric.setup(making, making_step)
    judging, judging_step = fabric.setup(judging, judging_step)
    loader = fabric.setup_dataloaders(loader)
    losses = []
    for _ in range(2):
        for noise, real in loader:
            real_score, fake_score = judging(real, making(noise).detach())
            judged = (F.softplus(-real_score) + F.softplus(fake_score)).mean()
            judging_step.zero_grad()
            fabric.backward(judged)
            judging_step.step()
            _, fake_score = judging(real, making(noise))
            made = F.softplus(-fake_score).mean()
            making_step.zero_grad()
            fabric.backward(made)
            making_step.step()
            losses += [fabric.all_reduce(each.detach()).item() for each in (judged, made)]
    fabric.print(json.dumps(losses))


if __name__ == "__main__":
    main()
