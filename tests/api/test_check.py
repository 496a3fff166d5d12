"""`weft check` as a user meets it: fresh processes, a sentence when equal, a cause when not, refusals with a fix.

What it says of a plan is found on the pool's ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checking import on_ranks
from pool import RankPool

import weft
from weft.api import check_by
from weft.cli import run
from weft.config.plan import DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import Recipe, parse_recipe
from weft.errors import LaunchError, PlanError, RecipeError
from weft.run.launch.launcher import ForkServer

RECIPE = """
[model]
reference = "decoder"
num_layers = 48
hidden_size = 1024
num_heads = 16
num_kv_heads = 8
sequence_length = 2048
dropout = 0.1
[batch]
global_batch_size = 64
[run]
steps = 1000
"""
MODEL = '''
import numpy
import torch
from torch import nn
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule


class Attention(nn.Module):
    """Written with the number of heads of the whole model."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, rows):
        query, key, value = (
            linear(rows).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head((rows + self.output(mixed)).mean(1))


def squares(outputs, batch):
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def build():
    """Its split table forgets that attention counts heads."""
    rules = [SplitRule(match=name, kind="column") for name in ("query", "key", "value")]
    return Blueprint(
        module=Attention(),
        inputs={"rows": "rows"},
        loss=squares,
        initialise=None,
        split=(*rules, SplitRule(match="output", kind="row")),
        divisible={"num_heads": 4},
        example=lambda n: {
            "rows": torch.empty(n, 5, 16, device="meta"), "targets": torch.empty(n, 3, device="meta")
        },
    )


class Masking(Attention):
    """Masks at random, as audio models do, from a generator that knows nothing of samples."""

    def forward(self, rows):
        return super().forward(rows * torch.from_numpy(numpy.random.rand(rows.shape[1], 1)).to(rows))


def build_masking():
    blueprint = build()
    blueprint.module = Masking()
    return blueprint


def build_without_example():
    return nn.Linear(4, 4)


def build_huge():
    blueprint = build()
    blueprint.module.register_parameter("huge", nn.Parameter(torch.empty(1 << 44, device="meta")))
    return blueprint
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe and a module of models."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "checked_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def factory(function: str) -> Recipe:
    return parse_recipe(
        f'[model]\nfactory = "checked_models:{function}"\n[batch]\nglobal_batch_size = 8\n[run]\nsteps = 9\n'
    )


def test_a_plan_that_equals_one_process(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "plan.toml").write_text(
        "[mesh]\nshard = 4\ntensor = 8\n[data_parallel]\nzero = 1\n[tensor_parallel]\nsequence = true\n"
        "[microbatch]\nsize = 2\nper_step = 8\n"
    )
    before = torch.get_rng_state(), torch.get_num_threads()
    assert run(["check", "recipe.toml", "--plan", "plan.toml", "--processes", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    assert told["equal"]
    assert told["processes"] == 4
    assert [found["precision"] for found in told["precisions"]] == ["fp64", "fp32"]
    exact = told["precisions"][0]
    assert 0 < exact["largest"]["gradient"] <= 1e-10
    assert exact["gradients"] == 20
    plan, model = told["what"]
    assert "data 4 × tensor 8; scaled down to data 2 × tensor 2 = 4 processes" in plan
    assert "48 blocks, width 1,024" in model
    assert "shrunk to 2 blocks" in model
    assert sorted(path.name for path in project.iterdir() if path.is_file()) == [
        "checked_models.py", "plan.toml", "recipe.toml",
    ]  # fmt: skip


def test_compression_is_left_out_and_the_report_says_so(fork_server: ForkServer, project: Path) -> None:
    recipe = factory("build")
    recipe = replace(recipe, permit=replace(recipe.permit, compression=("powersgd",)))
    plan = Plan(
        mesh=MeshPlan(replicate=2),
        data_parallel=DataParallelPlan(compression="powersgd", powersgd_rank=2),
        microbatch=MicrobatchPlan(size=4),
        memory=MemoryPlan(fused_loss=False),
    )
    before = fork_server.num_jobs
    report = weft.check(recipe, plan, fork_server=fork_server)
    assert fork_server.num_jobs == before + 1
    assert report.is_equal, str(report)
    assert report.plan.data_parallel.compression == "none"
    assert "compared without compression: powersgd changes gradients, which the recipe permits" in str(report)


def test_local_steps_are_left_out_and_the_report_says_so(ranks: RankPool, project: Path) -> None:
    recipe = factory("build")
    recipe = replace(recipe, permit=replace(recipe.permit, local_steps=5))
    plan = Plan(
        mesh=MeshPlan(replicate=2),
        data_parallel=DataParallelPlan(zero=0, local_steps=5, outer_momentum=0.5),
        microbatch=MicrobatchPlan(size=4),
        memory=MemoryPlan(fused_loss=False),
    )
    report = check_by(on_ranks(ranks), recipe, plan, processes=None, explain=True)
    assert report.is_equal, str(report)
    assert report.plan.data_parallel == DataParallelPlan(zero=0)
    assert "compared without local steps: replicas that step by themselves learn something else" in str(report)


def test_a_wrong_split_table_is_named_with_what_it_takes(ranks: RankPool, project: Path) -> None:
    plan = Plan(
        mesh=MeshPlan(replicate=2, tensor=2),
        microbatch=MicrobatchPlan(size=4),
        memory=MemoryPlan(fused_loss=False),
    )
    report = check_by(on_ranks(ranks), factory("build"), plan, processes=None, explain=True)
    assert not report.is_equal
    assert report.failure is not None
    assert report.failure.precision == "fp64"
    assert report.failure.mismatch is not None
    assert (report.failure.mismatch.kind, report.failure.mismatch.name) == ("loss", "step 1")
    assert report.failure.needs == ("tensor ranks",)
    text = str(report)
    assert "note      checked_models:build is no model that Weft can shrink: it runs as it is" in text
    assert "check     loss step 1 differs from one process by" in text
    assert "likely cause: the forward computes something else" in text
    assert "the first module that returns something else is output (by" in text  # where the heads are joined again
    assert "it takes tensor ranks: the rest of the plan makes no difference" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "plan.mesh.expert=2"), "plan.mesh.expert = 2"),
        (("--set", "plan.mesh.tensor=3"), "does not divide"),
        (("--plan", "absent.toml"), "absent.toml does not exist"),
        (("--processes", "1", "--plan", "wide.toml"), "Use 8 or more."),
        (("--jsn",), "Did you mean --json?"),
    ],
)
def test_what_cannot_be_checked(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    (project / "wide.toml").write_text(
        "[mesh]\nreplicate = 4\ntensor = 8\npipeline = 4\n[microbatch]\nsize = 1\nper_step = 16\n"
    )
    assert run(["check", "recipe.toml", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_model_without_an_example_says_what_is_missing(project: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be checked: nothing says what its samples look like"):
        weft.check(factory("build_without_example"), Plan(microbatch=MicrobatchPlan(size=8)))


def test_draws_that_no_plan_can_key_are_refused_and_no_difference(project: Path) -> None:
    with pytest.raises(PlanError, match="draws from numpy's generator, which cannot be keyed by sample"):
        weft.check(factory("build_masking"), Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=4)))


def test_a_model_that_is_too_large_says_how_to_make_it_smaller(project: Path) -> None:
    with pytest.raises(RecipeError, match=r"makes 17,592,186,0\d\d,\d+ parameters.*--set recipe.model.arguments"):
        weft.check(factory("build_huge"), Plan(microbatch=MicrobatchPlan(size=8)))


def test_a_rank_cannot_check(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="this one is a rank already"):
        weft.check("recipe.toml", Plan(tensor_parallel=TensorParallelPlan()))
