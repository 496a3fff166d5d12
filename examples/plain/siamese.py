"""A siamese network that learns whether two handwritten digits are the same, in plain PyTorch."""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, first, second):
        return self.head((self.body(first) - self.body(second)).abs()).flatten()


class Pairs(Dataset):
    """An image, and another that is drawn: of the same digit, or of another."""

    def __init__(self, first, last):
        data = load_digits()
        self.images = torch.tensor(data.images[first:last] / 16.0, dtype=torch.float32).unsqueeze(1)
        labels = data.target[first:last]
        self.same = [[j for j in range(last - first) if labels[j] == labels[i]] for i in range(last - first)]
        self.other = [[j for j in range(last - first) if labels[j] != labels[i]] for i in range(last - first)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if random.random() < 0.5:
            return self.images[index], self.images[random.choice(self.same[index])], torch.tensor(1.0)
        return self.images[index], self.images[random.choice(self.other[index])], torch.tensor(0.0)


def train(model, device, loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for step, (first, second, targets) in enumerate(loader):
        first, second, targets = first.to(device), second.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(model(first, second), targets)
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.6f}")


def main():
    torch.manual_seed(1)
    random.seed(1)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    loader = DataLoader(Pairs(0, 500), batch_size=64, shuffle=True)
    model = Siamese().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        train(model, device, loader, optimizer, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
