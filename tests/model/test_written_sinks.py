"""Scores that are bent, stand beside sinks, or lose their greatest, read as a call: what they are, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.attention.written import AttentionReader

SAMPLES, HEADS, TOKENS, SIZE = 2, 3, 7, 4
TRIANGLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BAND = TRIANGLE.triu(-2)
Step = Callable[[Tensor, Tensor], Tensor]


class Refused(Exception):
    """What a reader did not understand."""


def reader() -> AttentionReader:
    def refused(place: str, what: str) -> Exception:
        return Refused(f"{place} {what}")

    made = AttentionReader(TOKENS, causal=False, refused=refused)
    made.enter("attention", nn.Identity())
    return made


def drawn() -> tuple[Tensor, ...]:
    """Query, key, value, and two sinks for each head."""
    generator = torch.Generator().manual_seed(0)
    sizes = (*((SAMPLES, HEADS, TOKENS, SIZE),) * 3, (HEADS, 2))
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes)


def beside(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([scores, sinks[None, :, None].expand(SAMPLES, -1, TOKENS, -1)], dim=-1)


def hidden(scores: Tensor, seen: Tensor = TRIANGLE) -> Tensor:
    return scores.masked_fill(~seen, -1e9)


def gemma(scores: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.tanh(scores * 0.5 / 2.0) * 2.0
    return F.softmax(hidden(scores, BAND), dim=-1, dtype=torch.float64).to(scores.dtype)


def gpt_oss(scores: Tensor, sinks: Tensor) -> Tensor:
    combined = beside(hidden(scores * 0.5), sinks[:, :1])
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]


STEPS: Mapping[str, Step] = {
    "gemma": gemma,
    "gpt oss": gpt_oss,
    "bent by a tensor of one number": lambda s, _: (torch.tensor(3.0) * (s / torch.tensor(3.0)).tanh()).softmax(-1),
    "bent, then scaled": lambda s, _: ((0.3 * s).tanh() * 5.0 / 2.0).softmax(-1),
    "bent, with sinks": lambda s, sinks: beside(hidden((s / 2.0).tanh() * 2.0), sinks[:, :1]).softmax(-1)[..., :-1],
    "two sinks": lambda s, sinks: beside(hidden(s), sinks).softmax(3)[:, :, :, :TOKENS],
    "greatest off": lambda s, _: ((q := hidden(s)) - q.max(-1, keepdim=True)[0]).softmax(-1),
    "greatest off, detached": lambda s, _: (s - s.amax((-1,), keepdim=True).detach()).softmax(-1),
    "greatest off by place": lambda s, _: torch.sub(s, torch.max(s, -1, True)[0]).softmax(-1),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_read_is_what_is_written(name: str) -> None:
    made: list[tuple[Tensor, ...]] = []
    for read in (True, False):
        query, key, value, sinks = operands = drawn()
        if read:
            with reader():
                mixed = STEPS[name](query @ key.mT, sinks) @ value
            assert type(mixed) is Tensor
        else:
            mixed = STEPS[name](query @ key.mT, sinks) @ value
        weights = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view(mixed.shape)
        found = torch.autograd.grad((mixed * weights).sum(), operands, allow_unused=True, materialize_grads=True)
        made.append((mixed.detach(), *found))
    for found, wanted in zip(*made, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def per_token(scores: Tensor, sinks: Tensor) -> Tensor:
    each = torch.arange(TOKENS, dtype=scores.dtype)[None, None, :, None].expand(SAMPLES, HEADS, -1, 1)
    return torch.cat([scores, each], -1).softmax(-1)[..., :-1]


REFUSED: Mapping[str, tuple[Step, str]] = {
    "bent twice": (lambda s, _: s.tanh().tanh().softmax(-1), "tanh to scores that something was done to"),
    "masked, then bent": (lambda s, _: hidden(s).tanh().softmax(-1), "tanh to scores some of which are hidden"),
    "bent probabilities": (lambda s, _: s.softmax(-1).tanh(), "tanh to scores that something was done to"),
    "bent by a parameter": (
        lambda s, _: (s.tanh() * nn.Parameter(torch.ones(()))).softmax(-1), "softmax of something else"
    ),
    "bent the other way": (lambda s, _: (s.tanh() * -2.0).softmax(-1), "multiplies scores by -2"),
    "bent in place": (lambda s, _: s.tanh_().softmax(-1), "does tanh_"),
    "sinks before keys": (
        lambda s, sinks: torch.cat([sinks[None, :, None].expand(SAMPLES, -1, TOKENS, -1), s], -1).softmax(-1)[..., 2:],
        "no sink behind them",
    ),
    "sinks of each token": (per_token, "differs between samples or tokens"),
    "sinks left": (lambda s, sinks: beside(s, sinks).softmax(-1), "does matmul to scores and sinks at once"),
    "one sink left": (lambda s, sinks: beside(s, sinks).softmax(-1)[..., :-1], "not all but those of its sinks"),
    "a key cut off": (lambda s, sinks: beside(s, sinks[:, :1]).softmax(-1)[..., :-2], "not all but those of its sinks"),
    "the first cut off": (lambda s, sinks: beside(s, sinks[:, :1]).softmax(-1)[..., 1:], "not all but those"),
    "queries cut off": (lambda s, sinks: beside(s, sinks[:, :1]).softmax(-1)[:, :, :-1], "not all but those"),
    "cut off before the softmax": (lambda s, sinks: beside(s, sinks)[..., :-2].softmax(-1), "some of its scores"),
    "sinks twice": (lambda s, sinks: beside(beside(s, sinks).softmax(-1)[..., :-2], sinks), "no sink behind"),
    "sinks are scaled": (lambda s, sinks: (beside(s, sinks) * 2.0).softmax(-1), "does mul to scores and sinks"),
    "sinks are dropped": (
        lambda s, sinks: F.dropout(beside(s, sinks).softmax(-1), 0.5)[..., :-2], "does dropout to scores and sinks"
    ),
    "sinks beside probabilities": (lambda s, sinks: beside(s.softmax(-1), sinks)[..., :-2], "no sink behind them"),
    "greatest of another": (lambda s, _: (s - (s * 2.0).amax(-1, keepdim=True)).softmax(-1), "takes something off"),
    "greatest of all": (lambda s, _: (s - s.amax((-1, -2), keepdim=True)).softmax(-1), "not of each query"),
    "greatest without a dim": (lambda s, _: (s - s.max(-1).values[..., None]).softmax(-1), "not of each query"),
    "greatest alone": (lambda s, _: s.amax(-1, keepdim=True).softmax(-1), "does softmax to the greatest"),
    "a number off": (lambda s, _: (s - 1.0).softmax(-1), "takes something off"),
    "greatest beyond softmax": (lambda s, _: (q := s.softmax(-1)) - q.amax(-1, keepdim=True), "greatest of something"),
    "at least nothing": (lambda s, _: torch.maximum(s, torch.tensor(-math.pi)).softmax(-1), "takes the greater"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    step, what = REFUSED[name]
    query, key, value, sinks = drawn()
    with reader(), pytest.raises(Refused, match=f"^attention .*{what}"):
        torch.matmul(step(query @ key.mT, sinks), value)
