"""Every schedule against one process: gradients in fp64, in place, with tied weights and unequal shares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from stages_kit import Recorder, assert_equal, attach_views, gather, make_plan, summed_gradients
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import CutTable
from weft.techniques.core import ModelPart, SequentialRunner, StepContext
from weft.techniques.pipeline.parts import cut_parts
from weft.techniques.pipeline.runner import PipelineRunner
from weft.techniques.pipeline.ties import share_parameters

VOCABULARY, HIDDEN, BLOCKS = 23, 8, 8
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


class Block(nn.Module):
    """Linear maps with and without bias, one of them written as Hugging Face's Conv1D, a norm, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Parameter(torch.empty(2 * HIDDEN, HIDDEN))
        self.shift = nn.Parameter(torch.empty(HIDDEN))
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.frozen = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(hidden))).flatten(0, 1)
        hidden = hidden + torch.addmm(self.shift, inner, self.down).view_as(hidden) * scale
        return hidden + self.mix(self.frozen(hidden).transpose(1, 2)).transpose(1, 2)


class TinyLanguageModel(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(HIDDEN))
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(16, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, self.scale)
        return self.head(self.norm(hidden))


def token_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum().to(torch.float64)


def build(*, tied: bool) -> Blueprint:
    """A really constructed model (`initialise` None), the same on every rank."""
    module = TinyLanguageModel(tied=tied).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        cut=CutTable(
            entry="embedding",
            stem_zero=("positions",),
            blocks=tuple(f"blocks.{index}" for index in range(BLOCKS)),
            tail=("norm", "head"),
        ),
        example=lambda number: {"tokens": torch.empty(number, 5, dtype=torch.int64, device="meta")},
    )


def make_batches(number: int, *, length: int = 5, first: int = 0) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = []
    for index in range(first, first + number):
        generator = torch.Generator().manual_seed(100 + index)
        tokens = torch.randint(VOCABULARY, (2, length), generator=generator)
        labels = torch.randint(VOCABULARY, (2, length), generator=generator)
        labels[0, : index % length] = -100
        batches.append({"tokens": tokens, "labels": labels, "sample_ids": torch.arange(2) + 2 * index})
    return batches


def reference(batches: Sequence[Batch], *, tied: bool) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Gradients and loss of one process."""
    blueprint = build(tied=tied)
    part = ModelPart(module=blueprint.module)
    runner = SequentialRunner(part, blueprint, Mesh(MeshPlan(), torch.device("cpu")))
    totals = runner.forward_backward(batches, step=3, seed=7, scale=0.25, observer=Recorder())
    gradients = {name: p.grad for name, p in blueprint.module.named_parameters() if p.grad is not None}
    return gradients, (float(totals.sum), float(totals.count))


def run_pipeline(plan: Plan, tied: bool, shares: Sequence[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = build(tied=tied)
    parts = cut_parts(blueprint, plan, mesh, StepContext())
    share_parameters(parts)
    runner = PipelineRunner(parts, blueprint, plan, mesh)
    views, recorder = attach_views(parts), Recorder()
    data = mesh.index("data")
    batches = make_batches(shares[data], first=sum(shares[:data]))
    totals = runner.forward_backward(batches, step=3, seed=7, scale=0.25, observer=recorder)
    kept = all(p.grad is view and view.untyped_storage().data_ptr() == flat.data_ptr() for p, view, flat in views)
    gradients = summed_gradients(parts, mesh["data"].group)
    longer = runner.evaluate(make_batches(3, length=7), step=4, seed=7)
    again = runner.evaluate(make_batches(2, length=7)[:1], step=5, seed=7)
    return {
        "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
        "totals": (float(totals.sum), float(totals.count)),
        "evaluated": [(float(t.sum), float(t.count)) for t in (longer, again)],
        "kept": kept,
        "calls": recorder.calls,
        "parts": len(parts),
        "training": all(inner.training for part in parts for inner in part.module.modules()),
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_gradients_equal_one_process(ranks: RankPool, schedule: str, chunks: int, tied: bool) -> None:
    microbatches = 5
    gradients, (loss, count) = reference(make_batches(microbatches), tied=tied)
    plan = make_plan(schedule, chunks, 2)
    results = ranks.run(2, run_pipeline, plan, tied, (microbatches,))
    found, total, counted = gather(results, plan)
    assert_equal(found, gradients)
    assert (total, counted) == (pytest.approx(loss, rel=1e-12), count)
    assert all(result["kept"] and result["training"] for result in results)
    for result in results:
        told = [part for call, part in result["calls"] if call == "last_backward"]
        assert told == list(reversed(range(result["parts"])))
        before = [part for call, part in result["calls"] if call == "last_forward"]
        assert before == (told if schedule in ("gpipe", "1f1b", "interleaved_1f1b") else [])


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_four_stages_and_few_microbatches(ranks: RankPool, schedule: str, chunks: int) -> None:
    for microbatches in (3, 9):
        gradients, (loss, _) = reference(make_batches(microbatches), tied=True)
        plan = make_plan(schedule, chunks, 4)
        found, total, _ = gather(ranks.run(4, run_pipeline, plan, True, (microbatches,)), plan)
        assert_equal(found, gradients)
        assert total == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_unequal_shares_and_uneven_cuts(ranks: RankPool, schedule: str, chunks: int) -> None:
    gradients, (loss, count) = reference(make_batches(6), tied=True)
    cuts = (3,) if chunks == 1 else (1, 2, 6)
    plan = make_plan(schedule, chunks, 2, replicate=2, cuts=cuts)
    results = ranks.run(4, run_pipeline, plan, True, (5, 1))
    found, total, counted = gather(results, plan)
    assert_equal(found, gradients)
    assert (total, counted) == (pytest.approx(loss, rel=1e-12), count)


def test_evaluation_equals_one_process(ranks: RankPool) -> None:
    blueprint = build(tied=True)
    runner = SequentialRunner(ModelPart(module=blueprint.module), blueprint, Mesh(MeshPlan(), torch.device("cpu")))
    longer = runner.evaluate(make_batches(3, length=7), step=4, seed=7)
    for schedule, chunks in (("1f1b", 1), ("zbv", 2)):
        last = ranks.run(2, run_pipeline, make_plan(schedule, chunks, 2), True, (2,))
        found = [result["evaluated"][0] for result in last]
        assert sum(loss for loss, _ in found) == pytest.approx(float(longer.sum), rel=1e-12)
        assert sum(count for _, count in found) == float(longer.count)
    assert all(inner.training for inner in blueprint.module.modules())


def test_a_rank_without_microbatches_still_tells_its_parts() -> None:
    blueprint = build(tied=False)
    runner = SequentialRunner(ModelPart(module=blueprint.module), blueprint, Mesh(MeshPlan(), torch.device("cpu")))
    recorder = Recorder()
    totals = runner.forward_backward([], step=0, seed=0, scale=1.0, observer=recorder)
    assert (float(totals.count), recorder.calls) == (0.0, [("last_backward", 0)])


def test_a_model_without_a_table_cannot_be_cut(ranks: RankPool) -> None:
    with pytest.raises(
        PlanError, match="TinyLanguageModel has no table of where it may be cut.* Set plan.mesh.pipeline"
    ):
        ranks.run(2, cut_without_table)


def cut_without_table() -> None:
    blueprint = copy.copy(build(tied=False))
    blueprint.cut = None
    plan = make_plan("1f1b", 1, 2)
    cut_parts(blueprint, plan, Mesh(plan.mesh, torch.device("cpu")), StepContext())
