"""A small transformer that learns the next character, with a schedule of its learning rate."""

import math

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "the loom takes the weft over and under the warp, and the cloth grows by one thread at a time; " * 6


class Characters(Dataset):
    def __init__(self, length=12):
        self.known = sorted(set(TEXT))
        self.text = torch.tensor([self.known.index(each) for each in TEXT])
        self.length = length

    def __len__(self):
        return 64

    def __getitem__(self, index):
        start = 7 * index
        return self.text[start : start + self.length], self.text[start + 1 : start + self.length + 1]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        seen = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.query(seen), self.key(seen), self.value(seen), is_causal=True)
        return x + self.down(F.gelu(self.up(self.mixed(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary, width=16):
        super().__init__()
        self.embedding, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(12, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x) + self.place))


def main(**options):
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    fabric.seed_everything(19)
    dataset = Characters()
    with fabric.rank_zero_first():
        model = Transformer(len(dataset.known))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4) * math.exp(-step / 20))
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))

    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(fabric.all_gather(loss.detach()).mean().item())
    return losses
