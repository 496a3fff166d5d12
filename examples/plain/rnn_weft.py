"""A recurrent network that reads handwritten digits row by row, under any plan."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import weft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=8, hidden_size=32, batch_first=True)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        output, _ = self.rnn(x)
        return self.fc(output[:, -1])


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


session = weft.session()
torch.manual_seed(0)
device = torch.accelerator.current_accelerator() or torch.device("cpu")
data = load_digits()
images = torch.tensor(data.images / 16.0, dtype=torch.float32)
labels = torch.tensor(data.target)
loader = DataLoader(TensorDataset(images[:1197], labels[:1197]), batch_size=64, shuffle=True)
model = Net().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = session.prepare(model, optimizer, loader)

for epoch in range(2):
    model.train()
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        session.backward(loss)
        optimizer.step()
        if step % 6 == 0:
            session.print(f"epoch {epoch} step {step} loss {session.mean(loss):.6f}")
    held_out = accuracy(model, images[1197:].to(device), labels[1197:].to(device))
    session.print(f"epoch {epoch} accuracy {held_out:.4f}")
