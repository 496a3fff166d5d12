"""Embeddings from triplets: what belongs together comes closer than what does not. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft


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


def main(session: weft.Session):
    torch.manual_seed(0)
    model = Embedding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Triplets(), batch_size=16)
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    losses = []
    for _ in range(3):
        for batch in state.batches():
            losses.append(state.step(batch).loss)
    session.print(json.dumps(losses))


def loss_fn(embedded: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.triplet_margin_loss(*embedded, reduction="sum"), len(embedded[0])


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
