"""What data ranks gather for a loss that is no sum over samples is found by looking, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.model.blueprint import Batch, Blueprint
from weft.techniques.data.find_whole_batch import find_whole_batch, why_no_gathering


class Towers(nn.Module):
    def __init__(self, joined: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.joined = joined

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.joined(self.first(left), self.second(right))


@dataclass
class Own:
    scores: Tensor


def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    scores = outputs.scores if isinstance(outputs, Own) else outputs
    return scores.square().sum(), torch.tensor(float(len(batch["left"])), dtype=torch.float64)


loss.per_sample = False  # type: ignore[attr-defined]


def towers(joined: Callable[[Tensor, Tensor], Any]) -> Blueprint:
    return Blueprint(
        module=Towers(joined),
        inputs={"left": "left", "right": "right"},
        loss=loss,
        initialise=None,
        example=lambda n: {name: torch.empty(n, 4, device="meta") for name in ("left", "right")},
    )


def numbers_compared(a: Tensor, b: Tensor) -> Tensor:
    numbers = torch.arange(len(a))
    return (a @ b.t()) * (numbers[:, None] == numbers[None])


def own_rows(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.t())[torch.arange(len(a)), torch.arange(len(a))]


def by_size(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t() if len(a) > 5 else torch.relu(a) @ b.t()


@pytest.mark.parametrize(
    ("joined", "reason"),
    [
        (numbers_compared, "eq in numbers_compared compares numbers of samples"),
        (own_rows, "takes one rank's samples out of those of all"),
        (by_size, "does something else with another number of samples"),
        (lambda a, b: a * torch.eye(len(a))[:, :1] + torch.eye(len(a)) @ b.sum(1, True), "eye in"),
        (lambda a, b: Own(a @ b.t()), "returns a Own, whose tensors are not known"),
        (lambda a, b: torch.cat([a, b]), "has samples in more than one dim or in a part of one"),
    ],
)
def test_what_cannot_be_gathered_is_named(joined: Callable[[Tensor, Tensor], Any], reason: str) -> None:
    blueprint = towers(joined)
    assert reason in find_whole_batch(blueprint).reason
    assert reason in why_no_gathering(blueprint)


def test_one_product_is_gathered_at_its_operands_and_outputs_as_they_are_read() -> None:
    found = find_whole_batch(towers(lambda a, b: a @ b.t()))
    (dims,) = found.products.values()
    assert dims == (0, 1)
    assert [one.elements_per_sample for one in found.gathers] == [3, 3, 4]  # two operands, and a field of the batch
    assert [one.needs_gradient for one in found.gathers] == [True, True, False]
    found = find_whole_batch(towers(lambda a, b: a + b))
    assert found.products == {}
    assert found.outputs == (0,)


def test_a_generator_is_where_it_was() -> None:
    blueprint = towers(lambda a, b: nn.functional.dropout(a, 0.5) @ b.t())
    before = torch.random.get_rng_state()
    assert find_whole_batch(blueprint).reason == ""
    assert torch.equal(torch.random.get_rng_state(), before)
