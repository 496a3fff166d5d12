"""What looking at a model must not take for a split, what it says instead, and who says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.analysis.look import look
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import parse_recipe
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss
from weft.techniques.check import check_plan


class Base(nn.Module):
    """Two layers, between which a model does something."""

    def __init__(self) -> None:
        super().__init__()
        self.num_parts = 4
        self.tokens = nn.Embedding(48, 8)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(4))

    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return x.relu()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.norm(x + self.down(self.between(self.up(x), x)))


class Plain(Base):
    pass


class ScaledByACount(Base):
    """A divided count would scale otherwise: shapes alone do not show it."""

    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return (x.unflatten(-1, (self.num_parts, 4)) / self.num_parts).flatten(2)


class ScaledByTheWidth(Base):
    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return x.relu() * x.shape[-1] ** -0.5


class NormalisedByHand(Base):
    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Sorted(Base):
    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return x.sort(-1).values


class Lower(Base):
    """`tril` has the shape of an entry-wise operator and is none."""

    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return x.tril()


class Transformed(Base):
    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return torch.fft.fft(x).real


class UsesAParameterTwice(Base):
    """A parameter meets parts, and elsewhere what is whole: half of one gradient, and all of another."""

    def between(self, x: Tensor, before: Tensor) -> Tensor:
        return (x.unflatten(-1, (4, 4)) * self.scale).flatten(2) + before.sum() * self.scale.sum()


FORMS = (ScaledByACount, ScaledByTheWidth, NormalisedByHand, Sorted, Lower, Transformed, UsesAParameterTwice)


def looked_at(form: type[Base]) -> Blueprint:
    blueprint = Blueprint(
        module=form(),
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        vocabulary_size=48,
        sequence_length=6,
        example=token_example(6, ["tokens"]),
    )
    look(blueprint)
    return blueprint


def test_what_works_on_parts_is_split() -> None:
    blueprint = looked_at(Plain)
    assert (blueprint.kind_of("up"), blueprint.kind_of("down")) == ("column", "row")


@pytest.mark.parametrize("form", FORMS)
def test_what_needs_all_of_it_is_left_whole(form: type[Base]) -> None:
    blueprint = looked_at(form)
    assert blueprint.kind_of("up") is None
    assert blueprint.kind_of("down") is None


class Refusing(Base):
    def between(self, x: Tensor, before: Tensor) -> Tensor:
        raise LookupError("no such luck")


def test_a_forward_that_fails_is_a_sentence_and_no_exception() -> None:
    blueprint = looked_at(Refusing)
    assert not blueprint.splits
    assert "LookupError: no such luck" in blueprint.why_not("tensor")


def test_one_sentence_names_the_module_for_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole_model.py").write_text(
        "import torch\nfrom torch import nn\nfrom weft.model.blueprint import Blueprint\n"
        "from weft.model.losses import regression_loss\n"
        "class Sorting(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)\n"
        "    def forward(self, rows):\n"
        "        return self.down(self.up(rows).sort(-1).values)\n"
        "def build():\n"
        "    return Blueprint(module=Sorting(), inputs={'rows': 'rows'}, loss=regression_loss, initialise=None,\n"
        "        example=lambda n: {'rows': torch.empty(n, 4, device='meta'),\n"
        "                           'labels': torch.empty(n, 2, device='meta')})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = parse_recipe('[model]\nfactory = "whole_model:build"\n[batch]\nglobal_batch_size = 4\n[run]\nsteps = 1\n')
    facts = facts_of_blueprint(build_blueprint(recipe), recipe)
    assert facts.divisible == {}
    with pytest.raises(PlanError, match=r"up: the model's forward runs along it \(sort\).*\n.*data ranks"):
        check_plan(Plan(mesh=MeshPlan(tensor=2)), recipe, facts)
