"""Models that say how their tokens meet, and let them meet otherwise where they are evaluated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss
from weft.techniques.context.trace import attending_modules

Step = Callable[[nn.Module, Tensor], Tensor]


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


class Own(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.embedding, self.first, self.second, self.head = nn.Embedding(32, 8), Attends(), Attends(), nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.step(self, self.first(self.embedding(tokens))))


def attending(step: Step) -> list[str]:
    blueprint = Blueprint(
        module=Own(step), inputs={"tokens": "tokens"}, loss=token_loss, initialise=None, attention="causal",
        position_input="", sequence_length=7, example=token_example(7, ["tokens"]),
    )  # fmt: skip
    return attending_modules(blueprint)


def second(model: nn.Module, x: Tensor) -> Tensor:
    return model.get_submodule("second")(x)


def test_modules_that_attend_in_evaluation_alone_are_known() -> None:
    assert attending(lambda model, x: x) == ["first"]
    assert attending(lambda model, x: x if model.training else second(model, x)) == ["first", "second"]
    assert attending(lambda model, x: x if torch.is_grad_enabled() else second(model, x)) == ["first", "second"]


def test_attention_that_is_written_out_in_evaluation_is_refused() -> None:
    with pytest.raises(PlanError, match="makes a tensor of tokens × tokens by bmm"):
        attending(lambda model, x: x if model.training else x + (x @ x.transpose(1, 2)).softmax(-1) @ x)
