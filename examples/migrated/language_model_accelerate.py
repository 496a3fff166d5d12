"""A small language model whose padding counts for nothing. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens[:, :-1]))[0])


def load_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 32, (64, 13), generator=generator)
    lengths = torch.randint(4, 14, (64, 1), generator=generator)
    return TensorDataset(tokens * (torch.arange(13) < lengths))


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for (tokens,) in loader:
            count = accelerator.gather((tokens[:, 1:] != 0).sum()).sum()  # of the whole batch
            loss = F.cross_entropy(model(tokens).mT, tokens[:, 1:], ignore_index=0, reduction="sum") / count
            loss = loss * accelerator.num_processes  # gradients are means over the processes
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
