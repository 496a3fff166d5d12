"""A model of one's own for `weft train`, first as it is, then with the tables that let plans split it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import CutTable, SplitRule
from weft.model.blueprint import Blueprint
from weft.model.losses import token_loss


class Mixer(nn.Module):
    """Mixes tokens by a causal moving average, then features by two linear layers."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, wide)
        self.down = nn.Linear(wide, width)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden)
        count = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)
        inner = inner + inner.cumsum(1) / count[:, None]
        return hidden + self.down(F.gelu(self.up(inner)))


class MixerModel(nn.Module):
    """Tokens (samples, length) → logits (samples, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixer(width, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def plain(vocabulary: int = 512, width: int = 64, depth: int = 4) -> nn.Module:
    """Just the module.  Data parallelism and ZeRO need nothing more."""
    return MixerModel(vocabulary, width, depth)


def with_tables(vocabulary: int = 512, width: int = 64, depth: int = 4, length: int = 64) -> Blueprint:
    """The module on the meta device, and beside it how it splits, where it may be cut, how each module begins."""
    with torch.device("meta"):
        module = MixerModel(vocabulary, width, depth)
    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=initialise,
        split=[
            SplitRule(match="embedding", kind="vocab"),
            SplitRule(match="blocks.*.up", kind="column"),
            SplitRule(match="blocks.*.down", kind="row"),
            SplitRule(match="head", kind="column"),
        ],
        divisible={"width x 4": 4 * width, "vocabulary": vocabulary},
        cut=CutTable(
            entry="embedding", blocks=tuple(f"blocks.{index}" for index in range(depth)), tail=("norm", "head")
        ),
        vocabulary_head="head",
        task="causal_lm",
        vocabulary_size=vocabulary,
        sequence_length=length,
        example=lambda samples: {
            name: torch.zeros(samples, length, dtype=torch.int64, device="meta") for name in ("tokens", "labels")
        },
    )


def initialise(name: str, module: nn.Module) -> None:
    """Fill one module's own parameters; Weft has seeded torch's generator for its name."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
    bias = getattr(module, "bias", None)
    if bias is not None:
        nn.init.zeros_(bias)
