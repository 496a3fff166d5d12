"""Tables of channels that a user writes: those that a forward does not allow are refused, and name the module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.analysis.tensor_split.propose import propose_split
from weft.analysis.tensor_split.try_table import try_table
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe, SplitKind
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule
from weft.model.losses import class_loss
from weft.techniques.check import check_plan

Step = Callable[["Pair", Tensor], Tensor]
PAIR: Mapping[str, SplitKind] = {"first": "channel_out", "norm": "channels", "second": "channel_in"}


class Pair(nn.Module):
    """Two convolutions with a step between them, and two linear layers."""

    def __init__(self, step: Step | None = None, *, channels_last: bool = False) -> None:
        super().__init__()
        self.step, self.channels_last = step, channels_last
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.1)
        self.flat, self.last = nn.Linear(8 * 16, 12), nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(images)).relu()
        x = self.second(x if self.step is None else self.step(self, x))
        x = x.permute(0, 2, 3, 1) if self.channels_last else x
        return self.last(self.flat(x.flatten(1)).relu())


def with_table(table: Mapping[str, SplitKind], module: nn.Module) -> Blueprint:
    def example(samples: int) -> dict[str, Tensor]:
        numbers = torch.empty(samples, dtype=torch.int64, device="meta")
        pictures = torch.empty(samples, 3, 4, 4, device="meta")
        return {"images": pictures, "labels": numbers, "sample_ids": numbers.clone()}

    rules = [SplitRule(match=name, kind=kind) for name, kind in table.items()]
    return Blueprint(
        module=module, inputs={"images": "images"}, loss=class_loss, initialise=None, example=example, split=rules
    )  # fmt: skip


def problem(table: Mapping[str, SplitKind], module: nn.Module) -> str:
    blueprint = with_table(table, module)
    try_table(blueprint)
    assert not blueprint.notes
    return blueprint.why_not("tensor").removeprefix("its split table does not fit what its forward computes: ")


@pytest.mark.parametrize(
    "table",
    [
        PAIR,
        {**PAIR, "flat": "column", "last": "row"},
        {"second": "channel_out", "flat": "row"},
        {"norm": "replicate", "second": "channel_out", "flat": "row", "last": "replicate"},
    ],
)
def test_a_table_that_fits_is_left_alone(table: Mapping[str, SplitKind]) -> None:
    assert problem(table, Pair()) == ""


def dropped(model: Pair, x: Tensor) -> Tensor:
    return model.drop(x)


def test_dropouts_of_parts_need_a_rule() -> None:
    assert problem(PAIR, Pair(dropped)).startswith("drop works on parts of what is split, and no rule says so")
    assert problem({**PAIR, "drop": "heads"}, Pair(dropped)) == ""


REFUSED: Mapping[str, tuple[Mapping[str, SplitKind], Pair, str]] = {
    "softmax": (PAIR, Pair(lambda model, x: x.softmax(1)), "first cannot be .* runs along it"),
    "in evaluation": (
        PAIR, Pair(lambda model, x: x if model.training else x.softmax(1)), "first cannot be .* runs along it"
    ),
    "mean": (PAIR, Pair(lambda model, x: x - x.mean(1, keepdim=True)), "first cannot be .* reduces over it"),
    "shuffle": (
        PAIR, Pair(lambda model, x: x.view(len(x), 2, -1, 4, 4).transpose(1, 2).flatten(1, 2)), "lies in . blocks in"
    ),
    "channels last": (
        {"second": "channel_out", "flat": "row"}, Pair(channels_last=True), "lies in 16 blocks in flat"
    ),
    "no norm": ({"first": "channel_out", "second": "channel_in"}, Pair(), "norm works on parts .* be \"channels\""),
    "no reader": ({"first": "channel_out", "norm": "channels"}, Pair(), "first cannot be .* no layer takes its result"),
    "no maker": ({"second": "channel_in"}, Pair(), "second cannot be .* what it would take in parts is not split"),
    "another reader": ({**PAIR, "last": "row"}, Pair(), "last cannot be .* what it would take in parts is not split"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_does_not_fit_names_the_module(name: str) -> None:
    table, module, reason = REFUSED[name]
    found = problem(table, module)
    assert re.search(reason, found), found


def build_mixing() -> Blueprint:
    return with_table({}, Pair(lambda model, x: x.softmax(1)))


def recipe() -> Recipe:
    model = ModelRecipe(factory="test_hand_tables:build_mixing", split=dict(PAIR))
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


def test_plans_with_a_tensor_axis_are_refused() -> None:
    blueprint = build_blueprint(recipe())
    facts = facts_of_blueprint(blueprint, recipe())
    two = Plan(mesh=MeshPlan(tensor=2), microbatch=MicrobatchPlan(size=4))
    with pytest.raises(PlanError, match="does not fit what its forward computes: first cannot be"):
        check_plan(two, recipe(), facts)
    check_plan(Plan(microbatch=MicrobatchPlan(size=4)), recipe(), facts)
    assert build_blueprint(recipe(), two).why_not("tensor") == blueprint.why_not("tensor")


def test_a_table_that_cannot_be_tried_is_said() -> None:
    blueprint = replace(with_table(PAIR, Pair()), example=None)
    try_table(blueprint)
    assert blueprint.why_not("tensor") == ""
    assert "could not be tried" in blueprint.notes[0]


def test_a_proposal_is_a_table_that_fits() -> None:
    blueprint = with_table({}, Pair())
    propose_split(blueprint).apply_to(blueprint)
    assert blueprint.splits
    try_table(blueprint)
    assert blueprint.why_not("tensor") == ""
