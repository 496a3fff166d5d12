"""A model of the user's own in a recipe: what leaves something behind, or lets samples meet, is refused before a rank
starts; one process trains it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

import weft
from weft.errors import PlanError
from weft.plan import MeshPlan, MicrobatchPlan, Plan
from weft.recipe import Recipe, parse_recipe

MODELS = '''
import torch
from torch import nn

from weft.models import Blueprint


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 8))

    def forward(self, x):
        chosen = torch.cdist(x.flatten(0, 1), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes.index_add_(0, chosen, 0.1 * (x.flatten(0, 1) - self.codes[chosen]))
        return x + (self.codes[chosen].view_as(x) - x).detach()


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(256, 8), inner, nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))


def codebook():
    return Model(Codebook())


def centred():
    return Model(Centred())


def plain():
    return Model(nn.Dropout(0.1))


def spread(outputs, batch):
    """Far apart from one another."""
    means = outputs.mean(1)
    return torch.cdist(means + 1e-3 * torch.arange(len(means))[:, None], means).exp().sum(), len(means)


def contrastive():
    def example(number):
        return {"tokens": torch.zeros(number, 8, dtype=torch.int64, device="meta")}

    return Blueprint(
        module=Model(nn.Identity()), inputs={"tokens": "tokens"}, loss=spread, initialise=None, example=example,
        vocabulary_size=256, sequence_length=8, task="causal_lm",
    )
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    (tmp_path / "looked_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("looked_models", None)


def recipe(factory: str) -> Recipe:
    return parse_recipe(
        f'[model]\nfactory = "looked_models:{factory}"\nsequence_length = 8\n'
        '[data]\ntrain = [{ source = "synthetic" }]\nvalidation_fraction = 0.0\n'
        "[batch]\nglobal_batch_size = 8\n[run]\nsteps = 2\n"
    )


REFUSED = {
    "codebook": r"the forward of inner in Model changes its buffer codes by the samples",
    "centred": r"the forward of inner in Model lets the samples of a batch meet",
    "contrastive": r"Give the loss the attribute per_sample = False",
}


@pytest.mark.parametrize("factory", REFUSED)
def test_two_data_ranks_are_refused_before_they_start(factory: str, project: Path) -> None:
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=4))
    with pytest.raises(PlanError, match=REFUSED[factory]):
        weft.train(recipe(factory), plan, folder="run", quiet=True)
    assert not Path("run").exists(), "nothing is written"


@pytest.mark.parametrize("factory", ["codebook", "centred"])
def test_and_so_is_accumulation(factory: str, project: Path) -> None:
    with pytest.raises(PlanError, match=r"the forward of inner in Model"):
        weft.train(recipe(factory), Plan(microbatch=MicrobatchPlan(size=4, per_step=2)), folder="run", quiet=True)


def test_one_process_trains_it_and_ranks_train_others(project: Path) -> None:
    alone = weft.train(recipe("codebook"), Plan(microbatch=MicrobatchPlan(size=8)), folder="a", quiet=True)
    assert len(alone.losses) == 2
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=4))
    assert len(weft.train(recipe("plain"), plan, folder="b", quiet=True).losses) == 2
