"""Tokens of mixtures meet in attention alone where experts, and the way to them, work token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.tokens.find_sequence import SharedSequence, find_shared_sequence
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, WIDTH, EXPERTS, FFN = 12, 8, 4, 6
Routed = tuple[Tensor, Tensor]
Route = Callable[[Tensor], Routed]


class Experts(nn.Module):
    """As mixtures of the library write them; `other` is something else about them."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.num_experts, self.other = EXPERTS, other
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * FFN, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, FFN))

    def act_fn(self, made: Tensor) -> Tensor:
        gate, up = made.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(choices == expert)
            rows = tokens[token]
            if self.other == "centred":
                rows = rows - rows.mean(0)
            if self.other == "capacity":
                token, choice, rows = token[:3], choice[:3], rows[:3]
            made = F.linear(self.act_fn(F.linear(rows, self.up[expert])), self.down[expert])
            result = result.index_add(0, token, made * weights[token, choice, None])
        return result


def best(scores: Tensor) -> Routed:
    weights, choices = scores.softmax(-1).topk(2, -1)
    return choices, weights


def of_groups(scores: Tensor) -> Routed:
    """The best of the better half of two groups of experts."""
    groups = scores.view(-1, 2, 2).sum(-1).topk(1, -1).indices
    mask = torch.zeros_like(scores[:, :2]).scatter_(1, groups, 1)
    allowed = mask[..., None].expand(-1, -1, 2).reshape(-1, EXPERTS)
    choices = scores.masked_fill(~allowed.bool(), 0.0).topk(2, -1).indices
    return choices, scores.gather(1, choices)


def spread_out(scores: Tensor) -> Routed:
    choices = scores.topk(2, -1).indices
    weights = torch.zeros_like(scores).scatter(1, choices, scores.gather(1, choices)).softmax(-1)
    return choices, weights.gather(1, choices)


def first_come(scores: Tensor) -> Routed:
    """An expert takes three of its tokens."""
    choices = scores.topk(2, -1).indices
    place = F.one_hot(choices, EXPERTS).sum(1).cumsum(0).gather(1, choices)
    return choices, scores.gather(1, choices) * (place <= 3)


def balanced(scores: Tensor) -> Routed:
    return best(scores - scores.mean(0))


def by_experts(scores: Tensor) -> Routed:
    """Experts choose tokens."""
    taken = torch.zeros_like(scores).scatter_(0, scores.topk(3, 0).indices, 1.0)
    choices = scores.topk(2, -1).indices
    return choices, scores.gather(1, choices) * taken.gather(1, choices)


def of_neighbours(scores: Tensor) -> Routed:
    choices, weights = best(scores)
    return choices.roll(1, 0), weights


def beside(scores: Tensor) -> Routed:
    """Weights by tokens of another order."""
    choices, weights = best(scores)
    return choices, weights.view(2, -1, 2).transpose(0, 1).reshape(-1, 2)


ROUTES: Mapping[str, Route] = {"best": best, "of groups": of_groups, "spread out": spread_out}
MIXING: Mapping[str, Route] = {
    "first come": first_come, "balanced": balanced, "by experts": by_experts, "of neighbours": of_neighbours,
    "beside": beside,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, route: Route = best, experts: str = "", keeps: str = "") -> None:
        super().__init__()
        self.route, self.keeps = route, keeps
        self.token, self.gate, self.experts = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, EXPERTS), Experts(experts)
        self.head = nn.Linear(WIDTH, 32)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        rows = x.flatten(0, 1)
        scores = self.gate(rows).sigmoid() + self.bias
        if self.keeps == "in place":
            self.bias += 0.1 * scores.detach().mean(0)
        if self.keeps == "anew":
            self.bias = self.bias + 0.1 * scores.detach().mean(0)
        x = x + self.experts(rows, *self.route(scores)).view(x.shape)
        return self.head(x)


def found(module: nn.Module, **known: Any) -> SharedSequence | str:
    return find_shared_sequence(
        Blueprint(
            module=module, inputs={"tokens": "tokens"}, loss=token_loss, initialise=None, vocabulary_size=32,
            sequence_length=LENGTH, example=token_example(LENGTH), **known,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_a_mixture_works_token_by_token(name: str) -> None:
    assert found(Model(ROUTES[name])) == SharedSequence("", "causal", ("",))


@pytest.mark.parametrize("name", MIXING)
def test_what_lets_tokens_meet_on_the_way_to_experts_is_not_shared(name: str) -> None:
    assert "meet outside of attention" in str(found(Model(MIXING[name])))


@pytest.mark.parametrize("other", ["centred", "capacity"])
def test_experts_that_are_not_proven_are_not_shared(other: str) -> None:
    assert "meet outside of attention" in str(found(Model(experts=other)))


@pytest.mark.parametrize("keeps", ["in place", "anew"])
def test_what_a_forward_keeps_of_its_tokens_for_the_next_is_not_shared(keeps: str) -> None:
    said = found(Model(keeps=keeps))
    assert isinstance(said, str)
    assert ("bias" in said) if keeps == "anew" else ("meet outside of attention" in said)


class NeedsMask(Model):
    """Takes the mask that transformers makes, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="weft_masked")

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(4) if self.config._attn_implementation == "weft_masked" else None
        return super().forward(tokens) * mask[0]  # type: ignore[index]


def test_a_model_that_does_not_run_without_masks_says_so() -> None:
    assert "does not run without a mask of who sees whom" in str(found(NeedsMask()))
