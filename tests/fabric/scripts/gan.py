"""A generator of points on a ring against a critic: two models, two optimizers, a loss through both."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_generator():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def make_discriminator():
    return nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Flatten(0))


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(3)
    angles = 6.28 * torch.rand(64, 1)
    dataset = TensorDataset(torch.cat([angles.cos(), angles.sin()], 1))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))

    with fabric.init_module():
        generator, discriminator = make_generator(), make_discriminator()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, generator_optimizer = fabric.setup(generator, generator_optimizer)
    discriminator, discriminator_optimizer = fabric.setup(discriminator, discriminator_optimizer)

    losses = []
    for _ in range(2):
        for (real,) in loader:
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            discriminator_optimizer.zero_grad()
            real_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            fabric.backward(real_loss)
            fake = generator(torch.randn(len(real), 4, device=fabric.device))
            fake_loss = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
            fabric.backward(fake_loss)
            discriminator_optimizer.step()

            generator_optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            fabric.backward(loss)
            generator_optimizer.step()
            losses += fabric.all_reduce([real_loss.detach() + fake_loss.detach(), loss.detach()], reduce_op="mean")
    return [loss.item() for loss in losses]
