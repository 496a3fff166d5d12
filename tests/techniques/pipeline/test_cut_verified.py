"""What a forward does between the modules of its cut table, in training or in evaluation, is seen before it is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.families import CutTable
from weft.model.losses import token_loss
from weft.techniques.pipeline.verify import verify_cut_table

TABLE = CutTable(entry="embedding", blocks=("layers.0", "layers.1"), tail=("head",))


class Between(nn.Module):
    def __init__(self, between: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.embedding, self.drop = nn.Embedding(32, 8), nn.Dropout(0.5)
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.between(self, self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def own(between: Callable[[Between, Tensor], Tensor]) -> Blueprint:
    return Blueprint(
        module=Between(between), inputs={"tokens": "tokens"}, loss=token_loss, initialise=None, vocabulary_size=32,
        sequence_length=6, example=token_example(6, ["tokens"]),
    )  # fmt: skip


COMPUTING: tuple[Callable[[Between, Tensor], Tensor], ...] = (
    lambda model, x: 2 * x,
    lambda model, x: 2 * x if model.training else x,
    lambda model, x: x if model.training else 2 * x,
    lambda model, x: x if torch.is_grad_enabled() else 2 * x,
    lambda model, x: F.dropout(x, 0.5, model.training),
    lambda model, x: model.drop(x),
)


@pytest.mark.parametrize("between", COMPUTING)
def test_what_is_computed_between_its_modules_forbids_a_cut(between: Callable[[Between, Tensor], Tensor]) -> None:
    blueprint = own(between)
    state = torch.get_rng_state()
    with pytest.raises(PlanError, match="changes the activation outside embedding"):
        verify_cut_table(blueprint, TABLE)
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_without_logits_forbid_a_cut() -> None:
    class Named(Between):
        def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": super().forward(tokens)}

    blueprint = own(lambda model, x: x)
    blueprint.module = Named(lambda model, x: x)
    with pytest.raises(PlanError, match=r"returns a dict, in which no stage knows the tensor .* Return the logits"):
        verify_cut_table(blueprint, TABLE)


def test_nothing_between_them_lets_it_be_cut() -> None:
    verify_cut_table(own(lambda model, x: x), TABLE)
