"""A small language model whose padding counts for nothing. For Weft."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft


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


def main(session: weft.Session):
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(load_data(), batch_size=16)
    state = session.prepare(model, optimizer, loader, loss=loss_fn)
    losses = []
    for _ in range(3):
        for batch in state.batches():
            losses.append(state.step(batch).loss)
    session.print(json.dumps(losses))


def loss_fn(logits: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.mT, batch[0][:, 1:], ignore_index=0, reduction="sum"), batch[0][:, 1:].count_nonzero()


if __name__ == "__main__":
    with weft.session(quiet=True, record=False) as session:
        main(session)
