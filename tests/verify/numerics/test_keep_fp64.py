"""Casts inside of models are none under `KeepFp64`; what has to round is named, and a check allows for that, no more.

Drawn chains of operations are computed twice: with casts, under the mode, and without any."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checking import on_ranks
from pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.api import check_by
from weft.config.plan import MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import parse_recipe
from weft.verify.numerics import KeepFp64

TABLE = torch.linspace(-1, 1, 36).view(6, 6).mul(64).round().div(64)
"""A constant in fp32, as rotary tables are; exact in bf16, too, so that only what it meets may round."""

Step = Callable[[Tensor, torch.dtype], Tensor]
"""Takes x, and what to compute in."""


def rms(x: Tensor, narrow: torch.dtype) -> Tensor:
    y = x.to(narrow)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def times_table(x: Tensor, narrow: torch.dtype) -> Tensor:
    """A constant in fp32 meets what should be in fp32."""
    return (x.to(narrow) @ TABLE.to(narrow)).to(x.dtype)


def attention(x: Tensor, narrow: torch.dtype) -> Tensor:
    query = x.to(narrow)[None]
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)[0].to(x.dtype)


STEPS: dict[str, Step] = {
    "float": lambda x, narrow: x.to(narrow).sin().to(x.dtype),
    "half of it": lambda x, narrow: torch.cat([x[:, :3].to(narrow), x[:, 3:].to(narrow)], 1).type_as(x),
    "softmax": lambda x, narrow: F.softmax(x, -1, dtype=narrow).to(x.dtype),
    "log softmax": lambda x, narrow: F.log_softmax(x, -1, dtype=narrow).to(x.dtype),
    "rms": rms,
    "layer norm": lambda x, narrow: F.layer_norm(x.to(narrow), (6,)).to(x.dtype),
    "table": times_table,
    "einsum": lambda x, narrow: torch.einsum("ij,kj->ik", x.to(narrow), x.to(narrow)).softmax(-1).to(x.dtype) @ x,
    "sum": lambda x, narrow: x + x.sum(-1, keepdim=True, dtype=narrow).to(x.dtype),
    "mean": lambda x, narrow: x - x.mean(0, keepdim=True, dtype=narrow).to(x.dtype),
    "again": lambda x, narrow: checkpoint(lambda y: y.to(narrow).tanh().to(y.dtype), x, use_reentrant=False),
    "new": lambda x, narrow: torch.zeros_like(x.to(narrow)).copy_(x).to(x.dtype),
    "attention": attention,
}


def computed(names: list[str], narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    y = x
    for name in names:
        y = STEPS[name](y, narrow)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("seed", range(12))
def test_what_is_cast_inside_stays_in_fp64(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample(sorted(STEPS), 5)
    narrow = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    with KeepFp64() as mode:
        kept = computed(names, narrow)
    expected = computed(names, torch.float64)
    assert kept[0].dtype == torch.float64
    assert not mode.narrowed, names
    for ours, theirs in zip(kept, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-13, names


def test_without_the_mode_they_round() -> None:
    rounded, expected = (computed(["rms", "float"], kind) for kind in (torch.float32, torch.float64))
    assert 1e-9 < float((rounded[1] - expected[1]).norm() / expected[1].norm()) < 1e-5
    with KeepFp64(watches_only=True) as mode:
        watched = computed(["rms", "float"], torch.bfloat16)
    assert torch.equal(watched[1], computed(["rms", "float"], torch.bfloat16)[1])
    assert mode.narrowed == {"_to_copy": "bf16"}


def test_what_writes_into_narrow_memory_is_named() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    with KeepFp64() as mode:
        narrow = torch.zeros(4, 6)
        narrow.copy_(x)
        narrow.index_add_(0, torch.arange(4), x)
    assert mode.narrowed == {"copy_": "fp32", "index_add_": "fp32"}
    assert torch.equal(narrow, x.float() + x.float())


@pytest.mark.parametrize("watches_only", [True, False])
def test_the_least_number_of_a_wide_type_has_a_place(watches_only: bool) -> None:
    """As attention masks are made: a tensor of the default type with the least number of the scores' type."""
    scores = torch.randn(3, 4, dtype=torch.float64)
    least = torch.finfo(scores.dtype).min
    with KeepFp64(watches_only=watches_only) as mode:
        masked = torch.maximum(scores, torch.full((), least))
        with pytest.raises(RuntimeError, match="overflow"):
            torch.full((2,), 1e9, dtype=torch.int16)
    assert torch.equal(masked, scores)
    assert not mode.narrowed


@pytest.mark.parametrize("form", ["rows", "columns", "sums", "batch"])
def test_grouped_products_in_fp64(form: str) -> None:
    torch.manual_seed(0)
    offs = torch.tensor([8, 8, 24], dtype=torch.int32)
    shapes = {
        "rows": ((24, 16), (3, 16, 8)),
        "columns": ((3, 16, 8), (8, 24)),
        "sums": ((16, 24), (24, 8)),
        "batch": ((3, 16, 8), (3, 8, 16)),
    }
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes[form])
    given = {} if form == "batch" else {"offs": offs}
    with KeepFp64():
        product = torch._grouped_mm(a, b, **given)
        grads = torch.autograd.grad(product.square().sum(), (a, b))
        assert torch.equal(torch._grouped_mm(a, b.float(), **given), torch._grouped_mm(a, b.float().double(), **given))
    narrow = [tensor.detach().float().requires_grad_() for tensor in (a, b)]
    expected = torch._grouped_mm(*narrow, **given)
    theirs = torch.autograd.grad(expected.square().sum(), narrow)
    for ours, reference in zip((product, *grads), (expected, *theirs), strict=True):
        assert ours.dtype == torch.float64
        assert torch.allclose(ours.float(), reference, rtol=1e-4, atol=1e-4)


MODEL = '''
import torch
from torch import nn
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule


class Scores(nn.Module):
    """Keeps its scores in memory that is fp32 whatever the model's dtype, so that they round in fp64, too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, rows):
        scores = torch.zeros(rows.shape[0], self.up.out_features)
        scores[:] = self.up(rows).detach()
        return self.down(self.up(rows).relu() + scores.to(rows.dtype) * SHARE)


SHARE = 1.0


class Normed(nn.Module):
    """Its first bias has no gradient in exact arithmetic: batch norm takes every constant away."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Conv1d(1, 32, 3), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, rows):
        return self.down(self.norm(self.up(rows[:, None]) + 100.0).relu().sum(-1))


def squares(outputs, batch):
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def build(wrong=0.0, kind="Scores"):
    """With `wrong`, each data rank's loss is off by so much: no plan of several is equal."""
    def loss(outputs, batch):
        total, count = squares(outputs, batch)
        return total + wrong * outputs.square().sum() ** 2 / count, count

    return Blueprint(
        module=globals()[kind](),
        inputs={"rows": "rows"},
        loss=loss if wrong else squares,
        initialise=None,
        example=lambda n: {
            "rows": torch.empty(n, 6, device="meta"), "targets": torch.empty(n, 3, device="meta")
        },
    )
'''


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rounding_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("wrong", [0.0, 1e-5])
def test_a_model_that_must_round_is_held_to_its_rounding(ranks: RankPool, models: None, wrong: float) -> None:
    recipe = parse_recipe(
        '[model]\nfactory = "rounding_models:build"\n'
        f"arguments = {{ wrong = {wrong} }}\n[batch]\nglobal_batch_size = 8\n[run]\nsteps = 9\n"
    )
    plan = Plan(
        mesh=MeshPlan(replicate=2),
        microbatch=MicrobatchPlan(size=4),
        memory=MemoryPlan(fused_loss=False),
    )
    report = check_by(on_ranks(ranks), recipe, plan, processes=None, explain=False)
    assert report.is_equal == (wrong == 0.0), str(report)
    assert report.comparisons[0].rounds_inside == "copy_ rounds to fp32 inside the model"
    assert "copy_ rounds to fp32 inside the model" in str(report)
    if report.failure is not None:
        assert report.failure.mismatch is not None
        assert 1e-10 < report.failure.mismatch.limit < 1e-5


@pytest.mark.parametrize("wrong", [0.0, 1e-9])
def test_a_gradient_that_is_zero_in_exact_arithmetic_is_no_alarm(ranks: RankPool, models: None, wrong: float) -> None:
    """What is left of it in fp64 is rounding, which further runs of one process show; other limits stay."""
    recipe = parse_recipe(
        '[model]\nfactory = "rounding_models:build"\n'
        f'arguments = {{ wrong = {wrong}, kind = "Normed" }}\n[batch]\nglobal_batch_size = 8\n[run]\nsteps = 9\n'
    )
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=4), memory=MemoryPlan(fused_loss=False))
    report = check_by(on_ranks(ranks), recipe, plan, processes=None, explain=False)
    assert report.is_equal == (wrong == 0.0), str(report)
    if report.failure is None:
        assert report.comparisons[0].largest["gradient"] > 1e-10, "the bias before batch norm is noise beside the rest"
    else:
        assert report.failure.mismatch is not None
        assert report.failure.mismatch.limit == 1e-10
