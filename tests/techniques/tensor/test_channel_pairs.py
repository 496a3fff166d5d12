"""Which convolutions are shared out, what stays whole and why, and what it is said to send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.describe import describe
from weft.analysis.look import look
from weft.analysis.tensor_split.propose import propose_split
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import BatchRecipe, ConvNetShape, ModelRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.description import description_of, facts_of
from weft.model.losses import class_loss
from weft.model.profile import Profile
from weft.techniques.check import check_plan
from weft.verify.dry_run import trace_sends
from weft.verify.program import program_of

SAMPLES, ELEMENT = 4, 4


class Pair(nn.Module):
    """Two convolutions and what is between them; what is around them stands behind a softmax."""

    def __init__(self, middle: Callable[[Pair, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.batch, self.group, self.grouped = nn.BatchNorm2d(12), nn.GroupNorm(6, 12), nn.Conv2d(12, 24, 1, groups=6)
        self.all, self.layer, self.drop = nn.GroupNorm(1, 12), nn.LayerNorm(12), nn.Dropout(0.1)
        self.rows, self.each, self.along = nn.BatchNorm2d(6), nn.Conv2d(1, 1, 1), nn.Linear(6, 6)
        self.two = nn.LazyConv2d(8, 3, padding=1)
        self.head = nn.Linear(8, 5)
        self.middle = middle

    def forward(self, images: Tensor) -> Tensor:
        made = self.middle(self, self.one(self.stem(images).softmax(1)).relu())
        return self.head(self.two(made).softmax(1).mean((2, 3)))


def blueprint_of(middle: Callable[[Pair, Tensor], Tensor]) -> Blueprint:
    module = Pair(middle)
    module(torch.zeros(2, 3, 6, 6))

    def example(samples: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            ids, labels = torch.zeros(2, samples, dtype=torch.int64)
            return {"images": torch.zeros(samples, 3, 6, 6), "labels": labels, "sample_ids": ids}

    return Blueprint(
        module=module, inputs={"images": "images"}, loss=class_loss, initialise=None, task="classification",
        example=example,
    )  # fmt: skip


SHARED: dict[str, tuple[Callable[[Pair, Tensor], Tensor], set[str]]] = {
    "nothing": (lambda net, x: x, set()),
    "a batch norm": (lambda net, x: net.batch(x), {"batch"}),
    "groups": (lambda net, x: net.group(x), {"group"}),
    "a convolution in groups": (lambda net, x: net.grouped(net.batch(x)), {"batch", "grouped"}),
    "pooling": (lambda net, x: F.max_pool2d(F.interpolate(x, scale_factor=2.0), 2), set()),
    "a gate": (lambda net, x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), set()),
    "channels that change places": (lambda net, x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), set()),
}
"""What stands between → the modules that work on a part of the channels."""
WHOLE: dict[str, tuple[Callable[[Pair, Tensor], Tensor], str]] = {
    "softmax": (lambda net, x: x.softmax(1), "runs along it"),
    "concatenation": (lambda net, x: torch.cat((x, x.square()), 1), "joins it with others"),
    "one group": (lambda net, x: net.all(x), "normalises over all of it"),
    "a mean over channels": (lambda net, x: x - x.mean(1, keepdim=True), "reduces over it"),
    "weights that are borrowed": (
        lambda net, x: x + net.one.weight.square().mean(),
        "its parts meet one.weight, which the model uses elsewhere, too",
    ),
    "statistics that are borrowed": (
        lambda net, x: net.batch(x) + net.batch.running_var.mean(),
        "reads batch.running_var, too",
    ),
    "a dropout among halves": (
        lambda net, x: net.drop(x).chunk(2, 1)[0] * x.chunk(2, 1)[1],
        "do not lie behind one another",
    ),
    "functions that drop among halves": (
        lambda net, x: F.dropout(x, 0.1).chunk(2, 1)[0] * x.chunk(2, 1)[1],
        "do not lie behind one another",
    ),
    "a dropout of other dims, too": (
        lambda net, x: net.drop(x) + net.drop(x.movedim(1, -1)).movedim(-1, 1),
        "drop drops entries of what is divided otherwise",
    ),
    "statistics of rows": (lambda net, x: net.rows(x.transpose(1, 2)).transpose(1, 2), "rows takes statistics over it"),
    "a convolution of each channel": (
        lambda net, x: net.each(x.flatten(0, 1).unsqueeze(1)).view_as(x),
        "each meets all of it with one weight",
    ),
    "a linear layer along rows": (lambda net, x: net.along(x), "along meets all of it with one weight"),
    "functional norms": (
        lambda net, x: F.batch_norm(x, net.batch.running_mean, net.batch.running_var, net.batch.weight),
        "computes a norm inside a Pair of its own",
    ),
}
"""What stands between → why the pair is not formed."""


def kinds(blueprint: Blueprint) -> dict[str, str]:
    return {proposed.rule.match: proposed.rule.kind for proposed in propose_split(blueprint).rules}


@pytest.mark.parametrize("between", SHARED)
def test_a_pair_is_found(between: str) -> None:
    middle, channelwise = SHARED[between]
    found = kinds(blueprint_of(middle))
    assert found["one"] == "channel_out"
    assert found["two"] == "channel_in"
    assert {name for name, kind in found.items() if kind == "channels"} == channelwise


@pytest.mark.parametrize("between", WHOLE)
def test_what_mixes_channels_keeps_them_whole(between: str) -> None:
    middle, reason = WHOLE[between]
    proposal = propose_split(blueprint_of(middle))
    assert proposal.rules == ()
    assert reason in dict(proposal.replicated)["one"]


class Scaled(nn.Conv2d):
    """Does more than convolve."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 1.5


def test_a_convolution_that_does_more_stays_whole() -> None:
    blueprint = blueprint_of(lambda net, x: x)
    blueprint.module.two = Scaled(12, 8, 3, padding=1)
    proposal = propose_split(blueprint)
    assert proposal.rules == ()
    assert "inside a Scaled of its own" in dict(proposal.replicated)["one"]


def test_channels_that_change_places_are_cut_within_their_groups() -> None:
    proposal = propose_split(blueprint_of(SHARED["channels that change places"][0]))
    assert {rule.rule.match: rule.rule.blocks for rule in proposal.rules} == {"one": 2, "two": 1}


def test_all_names_of_a_dropout_have_its_rule() -> None:
    blueprint = blueprint_of(lambda net, x: net.drop(x))
    blueprint.module.another = blueprint.module.drop
    assert {name: kind for name, kind in kinds(blueprint).items() if kind == "heads"} == {
        "drop": "heads", "another": "heads",
    }  # fmt: skip


def test_a_network_without_a_pair_is_refused_by_name() -> None:
    blueprint = blueprint_of(lambda net, x: x.softmax(1))
    look(blueprint)
    assert not blueprint.splits
    assert "runs along it (_softmax)" in blueprint.why_not("tensor")


def convnet(**sizes: object) -> Recipe:
    shape = ConvNetShape(**({"num_layers": 2, "channels": 24, "image_size": 6} | sizes))  # type: ignore[arg-type]
    return Recipe(
        model=ModelRecipe(shape=shape), batch=BatchRecipe(global_batch_size=SAMPLES), run=RunRecipe(steps=1)
    )  # fmt: skip


def plan(tensor: int, *, sequence: bool = False) -> Plan:
    return Plan(
        mesh=MeshPlan(tensor=tensor),
        tensor_parallel=TensorParallelPlan(sequence=sequence),
        microbatch=MicrobatchPlan(size=SAMPLES),
    )


@pytest.mark.parametrize(
    ("recipe", "chosen", "words"),
    [
        (convnet(), plan(5), r"does not divide channels = 24\.\nUse 1, 2, 3"),
        (convnet(norm="group"), plan(2), r"does not divide norm_groups = 3\.\nUse 1 or 3"),
        (convnet(), plan(2, sequence=True), r"samples of a convnet are no sequences"),
    ],
    ids=["channels", "groups", "sequence"],
)
def test_a_plan_that_does_not_fit_is_refused(recipe: Recipe, chosen: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_plan(chosen, recipe, facts_of(recipe))


@dataclass
class Sums:
    """Elements that tensor ranks sum for a sample, as a profile says it."""

    profile: Profile

    @property
    def elements(self) -> float:
        operators = [operator for part in self.profile.parts for operator in part.operators]
        rows = [one for one in operators if one.kind == "convolution" and one.split == "row"]
        return sum(one.rows_per_token * one.n for one in rows) + sum(o.summed_elements_per_token for o in operators)


def bytes_sent(recipe: Recipe, blueprint: Blueprint) -> int:
    sends = program_of(recipe, plan(2), trace_sends(blueprint), 0).sends
    return sum(each.count * each.size_bytes for each in sends if each.technique == "tensor parallelism")


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_prices_are_of_the_bytes_that_are_sent(norm: str) -> None:
    recipe = convnet(norm=norm, channels=32)
    profile = description_of(recipe).profile
    assert Sums(profile).elements == Sums(describe(build_model(recipe))).elements
    assert SAMPLES * ELEMENT * Sums(profile).elements == bytes_sent(recipe, build_model(recipe))


def test_a_found_table_is_priced_by_the_bytes_that_are_sent() -> None:
    blueprint = blueprint_of(lambda net, x: net.grouped(net.batch(x)))
    look(blueprint)
    assert SAMPLES * ELEMENT * Sums(describe(blueprint)).elements == bytes_sent(convnet(), blueprint)
