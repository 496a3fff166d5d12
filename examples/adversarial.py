"""Two models in one loop: a generator learns a ring of points against a critic.

    python examples/adversarial.py
    weft launch -n 2 examples/adversarial.py

Each side has a state of its own.  `critic.frozen()` lets gradients flow through the critic to the generator and leaves
none in the critic.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft

Batch = dict[str, Tensor]


class Ring(Dataset[Batch]):
    """Points on the unit circle, and the noise to make others from; both are pure functions of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * torch.rand((), generator=generator)
        return {"real": torch.stack([angle.cos(), angle.sin()]), "noise": torch.randn(4, generator=generator)}


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Critic(nn.Module):
    """One score per point: how real it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.score = nn.Linear(64, 1)

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.score(self.layers(real)), self.score(self.layers(fake))


def critic_loss(scores: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    real, fake = scores
    return F.softplus(-real).sum() + F.softplus(fake).sum(), len(real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(Ring(), batch_size=64, shuffle=True)
    generator, critic = Generator(), Critic()

    with weft.session(quiet=True) as session:
        optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
        judging = session.prepare(critic, optimizer, loader, loss=critic_loss, inputs={"real": "real", "fake": "fake"})

        def generator_loss(fake: Tensor, batch: Batch) -> tuple[Tensor, int]:
            _, score = judging.model(batch["real"], fake)
            return F.softplus(-score).sum(), len(fake)

        optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        making = session.prepare(generator, optimizer, loader, loss=generator_loss, inputs={"noise": "noise"})

        for batch in making.batches(steps=arguments.steps):
            with torch.no_grad():
                fake = making.model(batch["noise"].to(session.device))
            judged = judging.step({"real": batch["real"], "fake": fake})
            with judging.frozen():
                made = making.step(batch)
            if session.rank == 0 and made.step % 50 == 0:
                off = (fake.norm(dim=1) - 1).abs().mean()
                losses = f"critic {judged.loss:.3f}  generator {made.loss:.3f}"
                print(f"step {made.step:4d}  {losses}  off the ring by {off:.3f}")


if __name__ == "__main__":
    main()
