"""Ranks that share a sequence draw what one process draws for their tokens, whatever function a model draws by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss
from weft.techniques.context.token_runs import runs_of
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness.draws import Draws, draws_of, keyed

LENGTH, WIDTH, SAMPLES = 11, 6, 3
Draw = Callable[[Tensor], Tensor]

SHARED: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rare dropout": lambda x: F.dropout(x, 0.003),
    "flat": lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape),
    "tokens first": lambda x: F.dropout(x.transpose(0, 1).contiguous(), 0.3).transpose(0, 1),
    "tokens last": lambda x: F.dropout(x.transpose(1, 2).contiguous(), 0.3).transpose(1, 2),
    "heads": lambda x: F.dropout(x.unflatten(-1, (2, 3)).transpose(1, 2), 0.3).transpose(1, 2).flatten(2),
    "whole tokens": lambda x: F.dropout1d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "gumbel": lambda x: x * F.gumbel_softmax(x, dim=-1),
    "noise": lambda x: x + torch.randn(*x.shape),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(-1, 1),
    "choices": lambda x: x + torch.multinomial(x.softmax(-1).flatten(0, 1), 2).view(*x.shape[:2], 2).sum(-1, True),
    "samples": lambda x: x * (torch.rand(x.shape[0], 1, 1) < 0.7),
    "all alike": lambda x: x * (torch.rand(1) < 0.7),
    "weights": lambda x: x * (1 + torch.randn(WIDTH)),
    "places": lambda x: x + torch.randn(1, x.shape[1], WIDTH),
    "twice": lambda x: F.dropout(F.dropout(x, 0.3).relu() + x, 0.2),
}
"""Draws that are of tokens, of samples, or of all."""
REFUSED: dict[str, Draw] = {
    "pairs": lambda x: x + F.dropout(x @ x.transpose(1, 2), 0.3) @ x,
    "tokens among heads": lambda x: (
        F.dropout(x.unflatten(-1, (2, 3)).transpose(1, 2).reshape(-1, 3), 0.3)
        .view(x.shape[0], 2, -1, 3)
        .transpose(1, 2)
        .flatten(2)
    ),
    "features of tokens": lambda x: F.dropout(x.flatten(1), 0.3).view(x.shape),
    "chunks": lambda x: x + torch.randn(x.shape[0], 1 + x.shape[1] // 4, 1).mean(1, keepdim=True),
    "one more": lambda x: x + torch.randn(x.shape[0], x.shape[1] + 1, WIDTH)[:, 1:],
}
"""Draws of which nobody can say which numbers are those of which token."""


class Model(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw, self.token, self.head = draw, nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.draw(self.token(tokens)))


def blueprint_of(draw: Draw, **known: Any) -> Blueprint:
    return Blueprint(
        module=Model(draw), inputs={"tokens": "tokens"}, loss=token_loss, initialise=None, vocabulary_size=16,
        sequence_length=LENGTH, example=token_example(LENGTH), position_input="", attention="full", **known,
    )  # fmt: skip


def plan_of(context: int) -> Plan:
    return Plan(mesh=MeshPlan(context=context), microbatch=MicrobatchPlan(size=SAMPLES))


def drawn(blueprint: Blueprint, x: Tensor, draws: Draws, tokens: LocalTokens | None = None) -> Tensor:
    state = MicrobatchState(
        seed=3, step=2, sample_ids=torch.tensor([5, 1, 8]), sequence_length=x.shape[1], tokens=tokens
    )
    context = StepContext(current=state)
    draw: Any = blueprint.module.draw
    return keyed(draw, "", draws, GroupView((0,), 0, None), context)(x)


@pytest.mark.parametrize("name", SHARED)
def test_a_rank_draws_its_part_of_what_one_process_draws(name: str) -> None:
    """Also of samples that are shorter than the example."""
    blueprint = blueprint_of(SHARED[name], attending=("",))
    alone, *shared = (draws_of(blueprint, plan_of(ranks)) for ranks in (1, 2, 3))
    for length in (LENGTH, 8):
        x = torch.randn(SAMPLES, length, WIDTH, generator=torch.Generator().manual_seed(0)).double()
        whole = drawn(blueprint, x, alone)
        for ranks, draws in enumerate(shared, start=2):
            for index in range(ranks):
                runs = runs_of(length, ranks, index)
                mine = torch.cat([torch.arange(*run) for run in runs])
                part = drawn(blueprint, x[:, mine], draws, LocalTokens(length=length, runs=runs))
                assert torch.equal(part, whole[:, mine])


def share(name: Draw, tokens: LocalTokens, **known: Any) -> None:
    blueprint = blueprint_of(name, **known)
    x = torch.zeros(SAMPLES, tokens.held, WIDTH, dtype=torch.float64)
    drawn(blueprint, x, draws_of(blueprint, plan_of(2)), tokens)


HALF = LocalTokens(length=LENGTH, runs=runs_of(LENGTH, 2, 0))


@pytest.mark.parametrize("name", REFUSED)
def test_what_shows_no_dim_of_tokens_is_refused(name: str) -> None:
    refused = r"draws by \w+ \(test_token_draws.py:\d+\) a tensor of .* which does not show .* plan.mesh.context = 1"
    with pytest.raises(PlanError, match=refused):
        share(REFUSED[name], HALF, attending=("",))


def test_flat_tokens_are_shared_only_where_a_forward_was_followed() -> None:
    """Rows of a mixture, sorted by expert, have the same shape."""
    with pytest.raises(PlanError, match="does not show which numbers are for the tokens of this rank"):
        share(SHARED["flat"], HALF)


def test_a_rank_whose_share_is_as_long_as_the_example_is_refused() -> None:
    """A dim of that length could be of its tokens, or the same for all."""
    tokens = LocalTokens(length=2 * LENGTH, runs=runs_of(2 * LENGTH, 2, 0))
    with pytest.raises(PlanError, match="does not show which numbers are for the tokens of this rank"):
        share(SHARED["dropout"], tokens, attending=("",))


def test_a_loss_that_draws_is_refused() -> None:
    blueprint = blueprint_of(SHARED["dropout"])

    def noisy(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return token_loss(outputs * (1 + 0.1 * torch.randn_like(outputs)), batch)

    blueprint.loss = noisy
    with pytest.raises(PlanError, match="its loss draws random numbers by functions"):
        draws_of(blueprint, plan_of(2))
