"""A small convolutional network on drawn digits, and its accuracy on what it has not seen."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.hidden, self.head = nn.Linear(96, 24), nn.Linear(24, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 1, stride=1)
        return self.head(F.relu(self.hidden(torch.flatten(x, 1))))


def digits(number, seed):
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 5, (number,), generator=draw)
    images = torch.randn(number, 1, 8, 8, generator=draw) * 0.5
    for image, target in zip(images, targets, strict=True):
        image[0, target : target + 2] += 1.5
    return TensorDataset(images, targets)


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    seed_everything(7)
    train = DataLoader(digits(44, 1), batch_size=8, shuffle=True)
    test = DataLoader(digits(21, 2), batch_size=8)
    train, test = fabric.setup_dataloaders(train, test)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    seen = []
    for epoch in range(2):
        model.train()
        for data, target in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()

        model.eval()
        total, correct, count = torch.zeros(3)
        with torch.no_grad():
            for data, target in test:
                output = model(data)
                total += F.cross_entropy(output, target, reduction="sum")
                correct += (output.argmax(1) == target).sum()
                count += len(target)
        total, correct, count = fabric.all_reduce((total, correct, count), reduce_op="sum")
        fabric.print(f"epoch {epoch}: loss {total / count:.3f}, accuracy {correct / count:.2f}")
        seen += [(total / count).item(), (correct / count).item()]
    return seen
