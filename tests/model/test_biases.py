"""What a model adds to scores by places alone, of whole samples, on ranks that have some of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from weft.model.attention.place_biases import Added, joined
from weft.model.attention.sample_biases import BiasesOfRank, WholeBiases
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

WIDTH, HEADS = 8, 2


@dataclass(slots=True)
class Growth:
    """How much stronger biases become; of no module."""

    factor: float = 1.0


class Attention(nn.Module):
    def __init__(self, growth: Growth) -> None:
        super().__init__()
        self.parts, self.growth = nn.Linear(WIDTH, 3 * WIDTH), growth

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
        tokens = x.shape[1]
        slopes = torch.tensor([0.5, 0.25], device=x.device)[:, None, None]
        bias = (slopes * torch.arange(1 - tokens, 1, device=x.device)).to(x.dtype)
        if not self.training:
            bias = bias * 2
        scores = (query @ key.mT + bias) * 0.5 + bias * self.growth.factor
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.growth = Growth()
        self.words, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Attention(self.growth) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def blueprint() -> Blueprint:
    inputs = {"tokens": "tokens"}
    return Blueprint(
        module=Model(), inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32, sequence_length=12,
        example=token_example(12, inputs.values()), attention="full", attending=("layers.0", "layers.1"),
        writes_attention=True, biased=True,
    )  # fmt: skip


def wanted(tokens: int, factor: float = 1.5) -> Tensor:
    return factor * torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None] * torch.arange(1.0 - tokens, 1)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_without_memory_makes_those_of_whole_samples(training: bool) -> None:
    whole = WholeBiases(blueprint(), torch.float32)
    for tokens in (12, 7):
        found = whole.of(tokens, training=training)
        assert list(found) == [("layers.0", 0), ("layers.1", 0)]
        assert whole.of(tokens, training=training) is found
        for bias in found.values():
            assert bias is not None
            assert torch.equal(bias.double(), wanted(tokens) * (1 if training else 2))


def test_a_rank_takes_those_of_whole_samples() -> None:
    made = blueprint()
    rank = BiasesOfRank(WholeBiases(made, torch.float64), made.module, lambda: (12, 6), lambda heads: 0)
    rank.begin()
    found = rank.placed(("layers.1", 0), wanted(6))
    torch.testing.assert_close(found, wanted(12))
    with pytest.raises(ValueError, match="adds something else to its scores than a forward of as many tokens showed"):
        rank.placed(("layers.1", 0), wanted(6, 1.6))
    with pytest.raises(ValueError, match="adds something else"):
        rank.placed(("layers.1", 0), wanted(6).requires_grad_())
    with pytest.raises(ValueError, match="adds something else"):
        rank.placed(("layers.1", 0), None)
    with pytest.raises(ValueError, match="no forward has shown"):
        rank.placed(("layers.1", 1), wanted(6))


def test_a_rank_that_has_some_of_the_heads_takes_theirs() -> None:
    made = blueprint()
    rank = BiasesOfRank(WholeBiases(made, torch.float64), made.module, lambda: (12, 6), lambda heads: 1)
    rank.begin()
    torch.testing.assert_close(rank.placed(("layers.0", 0), wanted(6)[1:]), wanted(12)[1:])


def test_what_changes_while_it_trains_is_seen() -> None:
    """Of a number of Python nothing is known, so every call compares."""
    made = blueprint()
    rank = BiasesOfRank(WholeBiases(made, torch.float64), made.module, lambda: (12, 6), lambda heads: 0)
    rank.begin()
    rank.placed(("layers.0", 0), wanted(6))
    grown = wanted(6, 0.5 + 1.1)
    with pytest.raises(ValueError, match="adds something else"):
        rank.placed(("layers.0", 0), grown)


@pytest.mark.parametrize(
    ("shape", "lead", "found"),
    [
        ((3 * HEADS, 1, 5), 1, (HEADS, 1, 5)),
        ((1, 5, 5), 1, (1, 5, 5)),
        ((HEADS, 1, 5), 2, (HEADS, 1, 5)),
        ((1, HEADS, 5, 5), 2, (HEADS, 5, 5)),
        ((5,), 2, (1, 1, 5)),
        ((5, 1), 2, (1, 5, 1)),
        ((4, 1, 5), 2, None),
        ((3 * HEADS, 1, 5), 2, None),
        ((4, 4), 2, None),
        ((1, 1, 1, 1, 5), 2, None),
    ],
)
def test_shapes(shape: tuple[int, ...], lead: int, found: tuple[int, ...] | None) -> None:
    bias = joined([Added(torch.ones(shape), 1.0, lead)], 3, HEADS, 5)
    assert (None if bias is None else tuple(bias.shape)) == found


def test_what_differs_between_samples_is_none() -> None:
    bias = torch.ones(3, HEADS, 1, 5)
    bias[1] = 2.0
    assert joined([Added(bias, 1.0, 2)], 3, HEADS, 5) is None
