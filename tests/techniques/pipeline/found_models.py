"""Models that no table knows, drawn by a seed: stacks, skips, side results, what runs twice and what runs outside."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.blueprint import Batch, Blueprint

VOCABULARY, HIDDEN, LENGTH = 23, 8, 5


class Layer(nn.Module):
    """A block by traits: what it reads beside its input, and what it returns."""

    def __init__(self, traits: frozenset[str]) -> None:
        super().__init__()
        self.traits = traits
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, beside: Tensor | None = None, *, side: Tensor | None = None) -> Any:
        change = self.down(F.gelu(self.up(self.norm(hidden))))
        if beside is not None:
            change = change * beside.mean(1, keepdim=True) + beside.roll(1, 1)
        if side is not None:
            change = change + side
        result = change if "bare" in self.traits else hidden + change
        if "tuple" in self.traits:
            passed = side is not None and "pass" in self.traits  # as T5 hands on its position bias
            return {"hidden": result, "side": side if passed else change.tanh(), "note": "text"}
        return result


class Stack(nn.Module):
    """Blocks one after another, and what the traits want around them."""

    def __init__(self, size: int, traits: frozenset[str], bias: nn.Module | None) -> None:
        super().__init__()
        self.traits = traits
        self.layers = nn.ModuleList(Layer(traits) for _ in range(size))
        self.bias = bias
        self.gain = nn.Parameter(torch.empty(HIDDEN))
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor, beside: Tensor | None) -> Tensor:
        kept: list[Tensor] = []
        side = None
        for number, layer in enumerate(self.layers):
            skip = kept.pop() if "skip" in self.traits and number >= len(self.layers) / 2 and kept else beside
            made: Any = layer(hidden * self.gain if "gain" in self.traits else hidden, skip, side=side)
            made, side = (made["hidden"], made["side"]) if "tuple" in self.traits else (made, None)
            hidden = hidden + made if "bare" in self.traits else made
            kept.append(hidden)
            if self.bias is not None and "again" in self.traits:
                hidden = self.bias(hidden)
        return self.last(hidden)


class Drawn(nn.Module):
    """One or two stacks; the second reads what the first made."""

    def __init__(self, sizes: list[int], traits: frozenset[str]) -> None:
        super().__init__()
        self.traits = traits
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.empty(LENGTH, HIDDEN))
        bias = nn.Linear(HIDDEN, HIDDEN)  # under several names where a stack uses it, too
        self.first = Stack(sizes[0], traits, bias if "again" in traits else None)
        self.second = Stack(sizes[1], traits, None) if len(sizes) > 1 else None
        self.mix = bias
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.unused = nn.Linear(HIDDEN, HIDDEN)
        if "tied" in traits:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        assert self.second is None or self.second.layers[0].norm.eps > 0, "a forward may look at modules of any stage"
        if "positions" in self.traits:
            hidden = hidden * HIDDEN**0.5 + self.positions
        if "write" in self.traits:
            hidden += 0.5
        if "mix" in self.traits:
            hidden = self.mix(hidden)
        made = self.first(hidden, None)
        if self.second is not None:
            made = self.second(self.embedding(tokens.flip(1)), made)
        if "mix" in self.traits:
            made = self.mix(made)
        if "late" in self.traits:  # what comes first is read last
            made = made + hidden
        if "functional" in self.traits:
            return F.linear(made, self.embedding.weight)
        return self.head(made)


TRAITS = ("bare", "tuple", "skip", "gain", "again", "tied", "positions", "write", "mix", "late", "functional", "pass")


def draw(seed: int) -> tuple[list[int], frozenset[str]]:
    """Sizes of the stacks, and traits."""
    generator = random.Random(seed)
    sizes = [generator.randint(2, 5)] if generator.random() < 0.5 else [generator.randint(2, 3) for _ in range(2)]
    return sizes, frozenset(trait for trait in TRAITS if generator.random() < 0.35)


def build(seed: int) -> Blueprint:
    """A really constructed model in fp64, the same on every rank."""
    module = Drawn(*draw(seed)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def example(number: int) -> dict[str, Tensor]:
        return {name: torch.empty(number, LENGTH, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}

    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        loss=loss,
        initialise=None,
        example=example,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
    )


def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum().to(torch.float64)


def batches(number: int) -> list[dict[str, Tensor]]:
    made: list[dict[str, Tensor]] = []
    for index in range(number):
        generator = torch.Generator().manual_seed(100 + index)
        tokens, labels = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator)
        labels[0, : index % LENGTH] = -100
        made.append({"tokens": tokens, "labels": labels, "sample_ids": torch.arange(2) + 2 * index})
    return made
