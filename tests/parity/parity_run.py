"""Runs cells on the pool and judges them as the law of the house says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import breakages
import cells
import torch
from cells import STEPS, Cell
from pool import RankPool
from predicted import unlike_predicted
from torch import Tensor

from weft.analysis.blueprint import look_for_blocks
from weft.analysis.look import look
from weft.analysis.tokens.find_sequence import look_at_tokens
from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.run.engine import TrainingState
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.data.gradient_reducer import BucketReducer
from weft.techniques.send_trace import Outline
from weft.techniques.tensor.mesh_2d.shape import num_loss_replicas
from weft.verify.dry_run import trace_sends
from weft.verify.numerics import TOLERANCES, Trial, assemble, compare, one_process, run_trial

_ROUNDING = 2.0**-24
ZERO_GRADIENTS: Mapping[str, str] = {
    "*.key.bias": "attention's softmax takes no notice of what is added to all scores of a query",
}
"""Glob over gradients that are zero in exact arithmetic, with the reason.  What is there is rounding noise, which has
no relative error: it is held against the floor of 1e-6 of the whole gradient in fp64, and not judged in fp32."""


@dataclass(slots=True)
class Result:
    """What all ranks saw together."""

    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    validation: float
    unpredicted: tuple[str, ...] = ()
    """What ranks sent otherwise than their predicted programs say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Largest relative difference of each kind, and the tensor that has it."""

    gradient: float
    loss: float
    norm: float
    validation: float
    state: float
    worst_gradient: str
    worst_state: str
    unpredicted: tuple[str, ...] = ()

    def failures(self, precision: str) -> list[str]:
        """What is beyond the tolerance, in words; in fp32 final weights are not judged (see `judge`)."""
        limit = TOLERANCES[precision]
        values = {
            f"gradient of {self.worst_gradient}": self.gradient,
            "loss": self.loss,
            "gradient norm": self.norm,
            "validation loss": self.validation,
        }
        if precision == "fp64":
            values[f"final {self.worst_state}"] = self.state
        wrong = [f"{what} differs by {value:.1e} > {limit:.0e}" for what, value in values.items() if not value <= limit]
        return [*wrong, *self.unpredicted]


def run_rank(recipe: Recipe, plan: Plan, steps: int, breakage: str | None = None, nudge: int = 0) -> Trial:
    """One rank of a cell, with a piece of Weft deliberately broken if so wished, or from nudged weights."""
    broken = breakages.entered(breakage) if breakage is not None else nullcontext(build_model)
    with broken as build:

        def make() -> Blueprint:
            blueprint = build(recipe)
            look_at(blueprint, plan)
            if plan.mesh.context > 1:  # where nothing says how tokens see one another
                look_at_tokens(blueprint, plan.mesh.context)
            return blueprint

        seen = list[TrainingState]()

        def inspect(training: TrainingState) -> None:
            seen.append(training)
            if nudge:
                _nudged(training, nudge)

        with without_traces_of_compiling():
            trial = run_trial(recipe, plan, make, steps=steps, inspect=inspect)
        named = plan.data_parallel.algorithm
        assert (named != "auto") == (num_messages(seen[0]) > 0), f"{named} is not what ran"
        return trial


def look_at(blueprint: Blueprint, plan: Plan) -> None:
    """See what nothing says of a model, and a plan needs to know: its blocks, and how it splits."""
    if plan.mesh.context > 1:
        look_for_blocks(blueprint, plan)
        if plan.mesh.tensor > 1 and not blueprint.splits:
            look(blueprint)


@contextmanager
def without_traces_of_compiling() -> Iterator[None]:
    """Forget the variables that torch.compile sets: a job must leave the environment as it was."""
    known = set(os.environ)
    try:
        yield
    finally:
        for name in [name for name in os.environ if "TORCHINDUCTOR" in name and name not in known]:
            del os.environ[name]


def num_messages(training: TrainingState) -> int:
    """That this rank was told to send by algorithms that the plan names."""
    stores = training.model.stores.stores
    buckets = [store for store in stores if isinstance(store, BucketReducer)]
    return sum(each.num_messages for store in buckets for each in store._collectives.values())


def _nudged(training: TrainingState, seed: int) -> None:
    """Change every weight by about one rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shard in training.model.stores.shards:
            shard.master.mul_(1 + _ROUNDING * torch.randn(shard.master.shape, generator=generator))


def joined(trials: list[Trial], plan: Plan) -> Result:
    """Put the ranks' pieces together.  Ranks that disagree about a loss or a norm give nan, which equals nothing."""

    def agreed(lists: list[list[float]]) -> list[float]:
        return [values[0] if len(set(values)) == 1 else float("nan") for values in zip(*lists, strict=True)]

    return Result(
        gradients=assemble([trial.gradients for trial in trials]),
        state=assemble([trial.state for trial in trials]),
        losses=agreed([trial.losses for trial in trials]),
        norms=agreed([trial.gradient_norms for trial in trials]),
        validation=sum(trial.validation for trial in trials) / num_loss_replicas(plan),
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """How far one process's own run moves when its weights begin one rounding elsewhere: the most up to each step."""

    losses: list[float]
    norms: list[float]
    validation: list[float]


def judge(reference: Result, found: Result, noise: Noise | None = None) -> Verdict:
    """Compare two results.

    Gradients and weights per tensor, ‖Δ‖ / max(‖g‖, 1e-6·‖G‖); losses and norms step by step, relative.  In fp32 the
    final weights are told but not judged: AdamW divides every gradient by its own size, so where a gradient is rounding
    noise, weights follow the noise.  The loss curve, which those weights make, is judged.

    Where `noise` says that a step's figure moves by more than a quarter of the tolerance from one rounding alone, its
    difference counts relative to four times that.  With ReLUs it does: an input of a ReLU that is zero but for rounding
    changes sign.  The convolutional network's gradient norms move by 1e-3 after five steps, its losses by 7e-6.
    """
    gradients, state = compare(reference.gradients, found.gradients), compare(reference.state, found.state)
    return Verdict(
        gradient=gradients[0].relative,
        loss=_farthest(reference.losses, found.losses, noise and noise.losses),
        norm=_farthest(reference.norms, found.norms, noise and noise.norms),
        validation=_farthest([reference.validation], [found.validation], noise and noise.validation),
        state=state[0].relative,
        worst_gradient=gradients[0].name,
        worst_state=state[0].name,
        unpredicted=found.unpredicted,
    )


def _farthest(wanted: list[float], found: list[float], noise: list[float] | None = None) -> float:
    differences = _differences(wanted, found)
    if noise is not None:
        limit = TOLERANCES["fp32"]
        differences = [each / max(1.0, 4 * own / limit) for each, own in zip(differences, noise, strict=True)]
    return float("inf") if any(value != value for value in differences) else max(differences)


def _differences(wanted: list[float], found: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True)]


def noise_of(reference: Result, nudged: Sequence[Result]) -> Noise:
    """The farthest that any of the nudged runs is from the reference, up to each step."""

    def most(values: Callable[[Result], list[float]]) -> list[float]:
        each = [_differences(values(reference), values(one)) for one in nudged]
        return list(accumulate((max(step) for step in zip(*each, strict=True)), max))

    return Noise(
        losses=most(lambda result: result.losses),
        norms=most(lambda result: result.norms),
        validation=most(lambda result: [result.validation]),
    )


def without_zero_gradients(found: Result) -> Result:
    """The result without the gradients that are zero in exact arithmetic."""

    def is_zero(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in ZERO_GRADIENTS)

    return replace(found, gradients={name: g for name, g in found.gradients.items() if not is_zero(name)})


@dataclass
class Matrix:
    """Runs cells, each model's reference once per precision."""

    ranks: RankPool
    models: Mapping[str, ModelRecipe]
    steps: int = STEPS
    backend: str = "gloo"
    """Of every process group."""
    _references: dict[tuple[str, str], Result] = field(default_factory=dict)
    _noises: dict[str, Noise] = field(default_factory=dict)
    _outlines: dict[tuple[ModelRecipe, bool, bool, bool], Outline] = field(default_factory=dict)

    @classmethod
    def create(cls, ranks: RankPool, folder: Path, steps: int = STEPS, backend: str = "gloo") -> Matrix:
        """Hugging Face configurations are written into `folder`."""
        return cls(ranks, cells.models(folder), steps, backend)

    def recipe(self, model: str, precision: str, **optimizer: Any) -> Recipe:
        return cells.recipe_of(self.models[model], precision, **optimizer)

    def run(self, recipe: Recipe, plan: Plan, *, breakage: str | None = None, nudge: int = 0) -> Result:
        """Run a plan on its world, after the checks that `weft train` makes."""
        check_plan(plan, recipe, facts_of(recipe), plan.mesh.world_size)
        check_runnable(plan)
        timeout = 480.0 if plan.compute.compile else 240.0  # of a hang; a busy machine takes its time
        arguments = (recipe, plan, self.steps, breakage, nudge)
        trials = self.ranks.run(plan.mesh.world_size, run_rank, *arguments, timeout=timeout, backend=self.backend)
        result = joined(trials, plan)
        if breakage is None and nudge == 0 and plan.mesh.world_size > 1:
            blueprint = build_model(recipe)
            look_at(blueprint, plan)
            known = recipe.model, blueprint.cut is None, plan.mesh.context > 1, bool(blueprint.splits)
            if plan.mesh.context > 1 and known not in self._outlines:
                look_at_tokens(blueprint, plan.mesh.context)
            outline = self._outlines.get(known) or trace_sends(blueprint)
            self._outlines[known] = outline
            result.unpredicted = tuple(unlike_predicted(recipe, plan, blueprint, outline, trials))
        return result

    def reference(self, model: str, precision: str) -> Result:
        """What one process computes: no axis, no technique, all samples in one microbatch."""
        key = (model, precision)
        if key not in self._references:
            plan = with_precision(one_process(cells.plan()), precision)
            self._references[key] = self.run(self.recipe(model, precision), plan)
        return self._references[key]

    def noise(self, model: str) -> Noise:
        """How far the fp32 reference moves from one rounding of its first weights."""
        if model not in self._noises:
            plan, recipe = with_precision(one_process(cells.plan()), "fp32"), self.recipe(model, "fp32")
            nudged = [self.run(recipe, plan, nudge=seed) for seed in (1, 2)]
            self._noises[model] = noise_of(self.reference(model, "fp32"), nudged)
        return self._noises[model]

    def verdict(self, cell: Cell, precision: str = "fp64", *, breakage: str | None = None) -> Verdict:
        """Run a cell and compare it with its reference."""
        plan = with_precision(cell.plan, precision)
        found = self.run(self.recipe(cell.model, precision), plan, breakage=breakage)
        reference = self.reference(cell.model, precision)
        if precision != "fp64":
            reference, found = without_zero_gradients(reference), without_zero_gradients(found)
        return judge(reference, found, self.noise(cell.model) if precision == "fp32" else None)


def with_precision(plan: Plan, precision: str) -> Plan:
    return replace(plan, compute=replace(plan.compute, precision=precision))  # type: ignore[arg-type]
