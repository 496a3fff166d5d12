"""A generator of points on a ring against a critic: two models, two optimizers. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft


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


def main(session: weft.Session):
    torch.manual_seed(0)
    making, judging = build_generator(), Critic()
    making_step = torch.optim.Adam(making.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judging_step = torch.optim.Adam(judging.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(load_data(), batch_size=16)
    critic = session.prepare(judging, judging_step, loader, loss=judged, inputs={"real": "real", "fake": "fake"})

    def made(fake: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return F.softplus(-critic.model(batch[1], fake)[1]).sum(), len(fake)

    maker = session.prepare(making, making_step, loader, loss=made)
    losses = []
    for _ in range(2):
        for batch in maker.batches():
            with torch.no_grad():
                fake = maker.model(batch[0])
            losses.append(critic.step({"real": batch[1], "fake": fake}).loss)
            with critic.frozen():
                losses.append(maker.step(batch).loss)
    session.print(json.dumps(losses))


def judged(scores: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (F.softplus(-scores[0]) + F.softplus(scores[1])).sum(), len(scores[0])


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
