"""Embeddings from triplets: what belongs together comes closer than what does not. In Accelerate's way."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from weft.accelerate import Accelerator


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layers(anchor), self.layers(like), self.layers(unlike)


class Triplets(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        anchor, noise, unlike = torch.randn(3, 8, generator=torch.Generator().manual_seed(index))
        return {"anchor": anchor, "like": anchor + 0.3 * noise, "unlike": unlike}


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Embedding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Triplets(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = F.triplet_margin_loss(*model(**batch))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
