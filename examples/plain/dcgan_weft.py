"""A generator and a discriminator of handwritten digits, under any plan."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader

import weft

nz, ngf, ndf = 16, 8, 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf * 2, 1, 2, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).flatten()


def weights_init(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


session = weft.session()
torch.manual_seed(999)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
images = torch.tensor(load_digits().images / 8.0 - 1.0, dtype=torch.float32).unsqueeze(1)
dataloader = DataLoader(images[:600], batch_size=64, shuffle=True)
netG = Generator().to(device)
netD = Discriminator().to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
netG, netD, optimizerG, optimizerD, dataloader = session.prepare(netG, netD, optimizerG, optimizerD, dataloader)

for epoch in range(2):
    for i, data in enumerate(dataloader):
        # the discriminator: real images up, made ones down
        netD.zero_grad()
        real = data.to(device)
        label = torch.ones(len(real), device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        session.backward(errD_real)
        D_x = session.mean(output.mean())
        noise = torch.randn(len(real), nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        session.backward(errD_fake)
        errD = errD_real + errD_fake
        optimizerD.step()
        # the generator: made images up
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake)
        errG = criterion(output, label)
        session.backward(errG)
        optimizerG.step()
        if i % 3 == 0:
            session.print(f"epoch {epoch} {i} D {session.mean(errD):.6f} G {session.mean(errG):.6f} real {D_x:.4f}")
