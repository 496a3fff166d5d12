"""A model of the user's own in a recipe: what leaves something behind, or lets samples meet, is refused before a rank
starts; one process trains it.  Blocks that only some samples run are found."""

from __future__ import annotations

import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, Recipe, RunRecipe, parse_recipe
from weft.errors import PlanError

MODELS = '''
import torch
from torch import nn

from weft.model.blueprint import Blueprint
from weft.model.families import CutTable


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


class Branching(nn.Module):
    """Samples that begin with an even token go through the second block."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        chosen = tokens[:, 0] % 2 == 0
        x = self.blocks[0](self.embedding(tokens))
        if chosen.any():
            x = x.index_put((chosen,), self.blocks[1](x[chosen]).tanh())
        return self.head(self.blocks[2](x))


def mean_of_squares(outputs, batch):
    return outputs.square().mean((1, 2)).sum(), torch.tensor(float(len(outputs)))


def branching():
    def example(number):
        return {"tokens": torch.zeros(number, 8, dtype=torch.int64, device="meta")}

    return Blueprint(
        module=Branching(), inputs={"tokens": "tokens"}, loss=mean_of_squares, initialise=None, example=example,
        vocabulary_size=256, sequence_length=8, task="causal_lm",
        cut=CutTable(entry="embedding", blocks=("blocks.0", "blocks.1", "blocks.2"), tail=("head",)),
    )


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


def test_a_block_that_only_some_samples_run_is_gathered_with_the_root(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks with one sample each go different ways in most steps."""
    made = replace(recipe("branching"), batch=BatchRecipe(global_batch_size=2), run=RunRecipe(steps=6))
    plan = Plan(mesh=MeshPlan(shard=2), data_parallel=DataParallelPlan(zero=3), microbatch=MicrobatchPlan(size=1))
    alone = weft.train(made, Plan(microbatch=MicrobatchPlan(size=2)), folder="a", quiet=True)
    found = weft.train(made, plan, folder="b")
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    told = capfd.readouterr().out
    assert "a forward runs blocks.1: so all ranks gather these weights with what stands" in told
    assert "two steps equal plain PyTorch" in told
