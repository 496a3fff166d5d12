"""A variational autoencoder of handwritten digits, in plain PyTorch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 4)
        self.fc22 = nn.Linear(40, 4)
        self.fc3 = nn.Linear(4, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


torch.manual_seed(1)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
train_loader = DataLoader(images[:1197], batch_size=128, shuffle=True)
test_loader = DataLoader(images[1197:], batch_size=128)
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=3e-3)


def train(epoch):
    model.train()
    for step, data in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item() / len(data):.6f}")


def test(epoch):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for data in test_loader:
            data = data.to(device)
            recon, mu, logvar = model(data)
            loss += loss_function(recon, data, mu, logvar).item()
    print(f"epoch {epoch} test loss {loss / len(test_loader.dataset):.6f}")


for epoch in range(1, 4):
    train(epoch)
    test(epoch)
