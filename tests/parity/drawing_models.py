"""Models that draw by functions, each a kind of draw between two linear maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.model.blueprint import Batch, Blueprint
from weft.model.families import CutTable, SplitRule

WIDTH, LENGTH = 8, 5


class Kind(nn.Module):
    """Applies a function that draws to (batch, length, width)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if kind in ("mha", "mha_first"):
            self.inner: nn.Module = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=kind == "mha")
        elif kind in ("lstm", "gru"):
            made = nn.LSTM if kind == "lstm" else nn.GRU
            self.inner = made(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        elif kind == "encoder_layer":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.3, batch_first=True)
        elif kind in ("alpha_module", "rrelu_module"):
            self.inner = nn.AlphaDropout(0.3) if kind == "alpha_module" else nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if hasattr(self, "inner"):
            first = self.kind == "mha_first"
            y = x.transpose(0, 1) if first else x
            made = self.inner(y, y, y) if self.kind in ("mha", "mha_first") else self.inner(y)
            made = made[0] if isinstance(made, tuple) else made
            return made.transpose(0, 1) if first else made
        return KINDS[self.kind](x) if self.training else x


def _sdpa(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    made = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3, is_causal=True)
    return made.transpose(1, 2).flatten(2)


def _noise(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + make(x).to(x) * 0.1 * x


KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_rare": lambda x: F.dropout(x, 0.003),
    "dropout_flat": lambda x: F.dropout(x.flatten(0, 1), 0.3).unflatten(0, x.shape[:2]),
    "dropout_length_first": lambda x: F.dropout(x.transpose(0, 1).contiguous(), 0.3).transpose(0, 1),
    "dropout_in_place": lambda x: F.dropout(x * 1.0, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3)[..., 0],
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.3)[..., 0, 0],
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: x * F.gumbel_softmax(x, dim=-1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x).detach()),
    "bernoulli_p": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "depth": lambda x: x * (torch.rand(x.shape[0], 1, 1) < 0.7),
    "depth_shared": lambda x: x * (torch.rand(1) < 0.7),
    "rand": _noise(lambda x: torch.rand(x.shape, dtype=x.dtype)),
    "rand_like": _noise(torch.rand_like),
    "randn": _noise(lambda x: torch.randn(*x.shape)),
    "randn_like": _noise(torch.randn_like),
    "randint": _noise(lambda x: torch.randint(0, 5, x.shape)),
    "randint_like": _noise(lambda x: torch.randint_like(x, 1, 4)),
    "normal": _noise(lambda x: torch.empty_like(x).normal_(1.0, 2.0)),
    "normal_of": _noise(lambda x: torch.normal(torch.zeros_like(x), 1.0)),
    "uniform": _noise(lambda x: torch.empty_like(x).uniform_(-1, 1)),
    "exponential": _noise(lambda x: torch.empty_like(x).exponential_()),
    "log_normal": _noise(lambda x: torch.empty_like(x).log_normal_(0.0, 0.3)),
    "geometric": _noise(lambda x: torch.empty_like(x).geometric_(0.5)),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x[..., 0].softmax(-1), 3)[..., None].expand(-1, -1, WIDTH)
                                      ).mean(1, keepdim=True) + x,
    "multinomial_replaced": lambda x: x
    + x.gather(1, torch.multinomial(x[..., 0].softmax(-1), 4, replacement=True)[..., None].expand(-1, -1, WIDTH)).mean(
        1, keepdim=True
    ),
    "weight_noise": lambda x: x * (1 + 0.1 * torch.randn(WIDTH)),
    "permuted_features": lambda x: x + x[..., torch.randperm(WIDTH)],
    "sdpa": _sdpa,
}  # fmt: skip
MODULES = ("mha", "mha_first", "lstm", "gru", "encoder_layer", "alpha_module", "rrelu_module")
ALL = (*KINDS, *MODULES)


class Block(nn.Module):
    def __init__(self, kind: str, checkpointed: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.draw = Kind(kind)
        self.drop = nn.Dropout(0.2 if checkpointed else 0.0)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed in ("", "never") or not self.training:
            return self._inside(x)
        return checkpoint(self._inside, x, use_reentrant=self.checkpointed == "reentrant")  # type: ignore[no-any-return]

    def _inside(self, x: Tensor) -> Tensor:
        return x + self.mix(self.drop(torch.tanh(self.draw(self.norm(x)))))


class Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean(1)


class Drawing(nn.Module):
    """Blocks that each draw in another way."""

    def __init__(self, kinds: tuple[str, ...], checkpointed: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, checkpointed) for kind in kinds)
        self.head = Head(WIDTH, 2)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.stem(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def noisy_squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Label noise, drawn in the loss."""
    noisy = batch["targets"] + 0.1 * torch.randn_like(batch["targets"])
    return (outputs - noisy).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def build_drawing(kinds: str, noisy_loss: bool = False, checkpointed: str = "") -> Blueprint:
    """`checkpointed`: how each block recomputes itself: `reentrant`, `new`, or `never` (with the same dropout)."""
    return Blueprint(
        module=Drawing(tuple(kinds.split()), checkpointed),
        inputs={"rows": "rows"},
        loss=noisy_squares if noisy_loss else squares,
        initialise=None,
        cut=CutTable(entry="stem", blocks=tuple(f"blocks.{i}" for i in range(len(kinds.split()))), tail=("head",)),
        example=lambda n: {
            "rows": torch.empty(n, LENGTH, 3, device="meta"),
            "targets": torch.empty(n, 2, device="meta"),
        },
    )


class SplitBlock(nn.Module):
    """Draws on heads and on features, of which a tensor rank has its share, and on whole activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, value = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query(y), self.value(y)))
        mixed = F.scaled_dot_product_attention(query, query, value, dropout_p=0.3)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.2)
        inner = F.dropout(F.gelu(self.up(self.second_norm(x))), 0.4)
        inner = inner * (1 + 0.1 * torch.randn_like(inner))
        return x + torch.bernoulli(torch.full_like(x, 0.7)) * self.down(inner)


class SplitDrawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(SplitBlock() for _ in range(2))
        self.head = Head(WIDTH, 2)

    def forward(self, rows: Tensor) -> Tensor:
        x = F.dropout(self.stem(rows), 0.1) if self.training else self.stem(rows)
        for block in self.blocks:
            x = block(x) if self.training else x
        return self.head(x)


def build_split_drawing() -> Blueprint:
    """For tensor ranks; the model draws outside of its stages, too, so it is not to be cut."""
    kinds = {"query": "column", "value": "column", "out": "row", "up": "column", "down": "row"}
    whole = build_drawing("dropout")
    return replace(
        whole,
        module=SplitDrawing(),
        split=tuple(SplitRule(match=f"blocks.*.{name}", kind=kind) for name, kind in kinds.items())
        + tuple(
            SplitRule(match=name, kind="replicate")
            for name in ("stem", "head", "blocks.*.norm", "blocks.*.second_norm")
        ),
        cut=CutTable(entry="stem", blocks=("blocks.0", "blocks.1"), tail=("head",)),
    )
