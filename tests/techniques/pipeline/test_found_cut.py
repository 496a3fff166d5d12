"""Models without a table are cut where one forward shows that they may be, and compute what one process does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_models import batches, build, draw
from pool import RankPool
from stages_kit import Recorder, assert_equal, attach_views, gather, make_plan, summed_gradients
from torch import Tensor, nn

from weft.analysis.find_cut import find_cut
from weft.analysis.tensor_split.propose import propose_split
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import FoundCut
from weft.techniques.core import ModelPart, SequentialRunner, StepContext
from weft.techniques.pipeline.cut import cut_stage
from weft.techniques.pipeline.parts import cut_parts
from weft.techniques.pipeline.runner import PipelineRunner
from weft.techniques.pipeline.ties import share_parameters

MICROBATCHES = 4


def found(blueprint: Blueprint) -> FoundCut:
    cut = find_cut(blueprint)
    assert not isinstance(cut, str), cut
    blueprint.cut, blueprint.block_costs = cut
    return cut[0]


def reference(seed: int) -> tuple[dict[str, Tensor], float]:
    blueprint = build(seed)
    runner = SequentialRunner(ModelPart(module=blueprint.module), blueprint, Mesh(MeshPlan(), torch.device("cpu")))
    totals = runner.forward_backward(batches(MICROBATCHES), step=3, seed=7, scale=0.25, observer=Recorder())
    gradients = {name: p.grad for name, p in blueprint.module.named_parameters() if p.grad is not None}
    return gradients, float(totals.sum)


def run_stages(plans: list[tuple[int, Plan]]) -> list[dict[str, Any]]:
    """Each drawn model under its plan, one after another."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for seed, plan in plans:
        mesh = Mesh(plan.mesh, torch.device("cpu"))
        blueprint = build(seed)
        found(blueprint)
        parts = cut_parts(blueprint, plan, mesh, StepContext(), torch.float64)
        share_parameters(parts)
        runner = PipelineRunner(parts, blueprint, plan, mesh)
        attach_views(parts)
        totals = runner.forward_backward(batches(MICROBATCHES), step=3, seed=7, scale=0.25, observer=Recorder())
        gradients = summed_gradients(parts, None)
        evaluated = runner.evaluate(batches(2), step=4, seed=7)
        results.append(
            {
                "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
                "totals": (float(totals.sum), float(totals.count)),
                "evaluated": float(evaluated.sum),
            }
        )
    return results


def plan_for(seed: int) -> Plan:
    blocks = sum(draw(seed)[0])
    choices = [("gpipe", 1), ("1f1b", 1), ("interleaved_zero_bubble", 1)]
    choices += [("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)] if blocks >= 4 else []
    generator = random.Random(seed)
    schedule, chunks = generator.choice(choices)
    cuts = tuple(sorted(generator.sample(range(1, blocks), 2 * chunks - 1)))
    return make_plan(schedule, chunks, 2, cuts=cuts)


@pytest.mark.parametrize("first", [0, 14, 28])
def test_drawn_models_compute_the_gradients_of_one_process(ranks: RankPool, first: int) -> None:
    """Whatever stands around, between and beside blocks: skips, side results, shared modules, sums outside."""
    plans = [(seed, plan_for(seed)) for seed in range(first, first + 14)]
    by_rank = ranks.run(2, run_stages, plans)
    for at, (seed, plan) in enumerate(plans):
        gradients, total = reference(seed)
        results = [results[at] for results in by_rank]
        merged, summed, _ = gather(results, plan)
        wanted = {name: gradient for name, gradient in gradients.items() if gradient.abs().max() > 0}
        merged = {name: gradient for name, gradient in merged.items() if gradient.abs().max() > 0}
        try:
            assert_equal(merged, wanted)
        except AssertionError as wrong:
            raise AssertionError(f"model {seed} {draw(seed)} under {plan.pipeline_parallel}: {wrong}") from None
        assert summed == pytest.approx(total, rel=1e-12)


def test_what_crosses_is_what_is_read() -> None:
    plain = {seed: found(build(seed)) for seed in range(40)}
    for seed, cut in plain.items():
        _, traits = draw(seed)
        assert all(crossings for crossings in cut.crossings)
        names = [crossing.module for crossings in cut.crossings for crossing in crossings]
        if not traits & {"bare", "tuple", "skip", "late", "again"} and not cut.between:
            assert names == list(cut.blocks[:-1]), f"{seed}: one activation crosses each border"
        if "late" in traits and not traits & {"mix", "functional"}:
            assert all(any(c.module == "embedding" for c in crossings) for crossings in cut.crossings) or cut.between


def test_what_stands_for_another_stage_is_no_module_of_this_one() -> None:
    """Its sizes can be read; nothing that works on a stage's modules finds any inside, nor changes the model."""
    blueprint = build(0)
    cut = found(blueprint)
    norm = f"{cut.blocks[0]}.norm"
    for stage, name in ((1, norm), (0, f"{cut.blocks[-1]}.norm")):
        part = cut_stage(blueprint, stage, (1,), torch.float64)
        foreign = part.get_submodule(name.removesuffix(".norm"))
        assert foreign.norm.eps == 1e-5  # type: ignore[union-attr]
        assert foreign.norm.weight.is_meta  # type: ignore[union-attr]
        with pytest.raises(AttributeError):
            part.get_submodule(name)
        with pytest.raises(PlanError, match="a LayerNorm inside of a module that another pipeline stage has"):
            foreign.norm(torch.zeros(1, 8))  # type: ignore[operator]


class _Few(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], number: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.layers = nn.ModuleList(make() for _ in range(number))
        self.head = nn.Linear(8, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class _Twice(_Few):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return self.head(hidden)


class _Hidden(nn.Module):
    """Leaves something behind that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.left: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.left = self.linear(hidden)
        return hidden + self.left


class _Peeking(_Few):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden + self.layers[0].left)  # type: ignore[operator]


class _Writing(_Few):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden *= 0.5
        return self.head(hidden)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: _Few(_block, 1), "no blocks that follow one another"),
        (lambda: _Twice(_block, 2), "layers.0 runs 2 times in one forward"),
        (lambda: _Peeking(_Hidden, 3), "layers.0 computes and does not return"),
        (lambda: _Writing(_block, 3), "is changed in place in the forward"),
    ],
)
def test_what_cannot_be_cut_says_why(model: Callable[[], nn.Module], reason: str) -> None:
    blueprint = build(0)
    blueprint.module = model()
    cut = find_cut(blueprint)
    assert isinstance(cut, str)
    assert reason in cut


class _Keeping(_Few):
    """Keeps what it computed, counts its runs, and has a module under two names."""

    def __init__(self) -> None:
        super().__init__(_block, 3)
        self.alias = self.layers[0]
        self.norm = nn.BatchNorm1d(8)
        self.kept: Tensor | None = None
        self.runs = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.runs += 1
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        self.kept = hidden if self.kept is None else self.kept
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_a_look_leaves_the_model_as_it_is() -> None:
    blueprint = build(0)
    blueprint.module = module = _Keeping()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    held = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    find_cut(blueprint)
    assert (module.runs, module.kept) == (0, None)
    assert {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)} == held
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    propose_split(blueprint)
    assert {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)} == held
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
