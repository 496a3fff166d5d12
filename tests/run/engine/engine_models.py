"""Models of a user's own: sparse tables, conditional branches, and samples for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.model.blueprint import Batch, Blueprint
from weft.model.families import SplitRule

ROWS = 40


class Tables(nn.Module):
    """Two tables of unequal width, a mean over each sample's tokens, and a dense part."""

    def __init__(self, *, sparse: bool, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 6, sparse=sparse)
        self.tags = nn.Embedding(ROWS, 4, sparse=sparse)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, ROWS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        x = torch.cat([self.words(tokens).mean(1), self.tags(tags).mean(1)], -1)
        return self.head(self.down(torch.tanh(self.up(x))))


def squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of weighted squares over samples, and their number."""
    expected = batch["targets"].to(outputs.dtype)
    return (outputs - expected).square().sum(), torch.tensor(float(outputs.shape[0]))


def tables_blueprint(*, sparse: bool, tied: bool = False, vocabulary: bool = False) -> Blueprint:
    torch.manual_seed(5)
    split = [SplitRule(match="up", kind="column"), SplitRule(match="down", kind="row")]
    return Blueprint(
        module=Tables(sparse=sparse, tied=tied).double(),
        inputs={"tokens": "tokens", "tags": "tags"},
        loss=squares,
        initialise=None,
        split=[*split, SplitRule(match="words", kind="vocab")] if vocabulary else split,
    )


def tables_sample(index: int) -> dict[str, Tensor]:
    """Tokens of which some samples name one row only, so that data ranks have different numbers of rows."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, ROWS if index % 8 < 4 else 2, (1, 5), generator=generator)
    return {
        "tokens": tokens,
        "tags": torch.randint(0, ROWS, (1, 2), generator=generator),
        "targets": torch.randn(1, ROWS, generator=generator, dtype=torch.float64),
    }


class Branches(nn.Module):
    """`rare` runs where a sample asks for it (every third step), `never` not at all, `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.rare = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, features: Tensor, asks: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(self.stem(features)))
        if bool(asks.any()):
            x = x + self.rare(x) * asks[:, None]
        return self.head(x)


def branches_blueprint() -> Blueprint:
    torch.manual_seed(6)
    return Blueprint(
        module=Branches().double(),
        inputs={"features": "features", "asks": "asks"},
        loss=squares,
        initialise=None,
    )


def branches_sample(index: int) -> dict[str, Tensor]:
    """Only sample 0 of every third step asks for the rare branch: one data rank uses it, the others do not."""
    generator = torch.Generator().manual_seed(index)
    return {
        "features": torch.randn(1, 6, generator=generator, dtype=torch.float64),
        "asks": torch.tensor([1.0 if index % 24 == 0 else 0.0], dtype=torch.float64),
        "targets": torch.randn(1, 3, generator=generator, dtype=torch.float64),
    }
