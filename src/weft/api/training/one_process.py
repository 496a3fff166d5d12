"""One process: what a plan is compared with, and how exactly it is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import Plan
from weft.config.recipe import Precision
from weft.model.blueprint import Blueprint
from weft.run.engine import TrainingState
from weft.verify.numerics import (
    EXACT,
    STEPS,
    CheckCase,
    Comparison,
    InnerCasts,
    PlainLoop,
    SmallCase,
    Trial,
    TrialResult,
    comparable,
    compare_results,
    join_trials,
    nudge_weights,
    one_process,
    perturb_constants,
    run_trial,
    without_dropout,
)

_NUDGES = 3
"""Runs of one process, with last digits moved, by which a difference is judged that the limits do not allow."""


@dataclass(slots=True, kw_only=True)
class OneProcess:
    """One process, in this process, and how exactly it computes what a plan is compared with."""

    small: SmallCase
    inside: InnerCasts
    exact: TrialResult
    """Results in fp64."""
    nudged: Sequence[TrialResult]
    """Results with weights moved by a rounding, where rounding inside could not be kept out; they set the limits."""
    rounds: str
    """The parts that round inside, in words."""

    @classmethod
    def of(cls, small: SmallCase, inside: InnerCasts = "wide") -> OneProcess:
        """Train in fp64, without the model's own casts to less unless it needs them."""
        plan = one_process(EXACT.plan(small.plan))
        try:
            trial = _trial_alone(small, plan, _builder(small), inside=inside)
        except (RuntimeError, TypeError, ValueError, AssertionError):
            if inside == "as written":
                raise
            return cls.of(small, "as written")
        nudged: list[TrialResult] = []
        rounds = ""
        if trial.narrowed:
            coarsest = max(trial.narrowed.values(), key=("fp32", "fp16", "bf16").index)
            build = partial(_nudged, small, coarsest)
            nudged.append(join_trials([_trial_alone(small, plan, build, inside=inside)], plan))
            verb = "rounds" if len(trial.narrowed) == 1 else "round"
            rounds = f"{' and '.join(trial.narrowed)} {verb} to {coarsest} inside the model"
        exact = join_trials([trial], plan)
        return cls(small=small, inside=inside, exact=exact, nudged=nudged, rounds=rounds)

    @property
    def build(self) -> Callable[[], Blueprint]:
        return _builder(self.small)

    def run(
        self,
        precision: Precision,
        build: Callable[[], Blueprint] | None = None,
        *,
        steps: int = STEPS,
        inspect: Callable[[TrainingState], None] | None = None,
        inside: InnerCasts | None = None,
    ) -> TrialResult:
        """Train without axes and techniques, the whole batch in one microbatch."""
        plan = one_process(CheckCase(precision).plan(self.small.plan))
        trial = _trial_alone(
            self.small, plan, build or self.build, steps=steps, inspect=inspect, inside=inside or self.inside
        )
        return join_trials([trial], plan)

    def judge(self, compare: Callable[[Sequence[TrialResult]], Comparison], precision: Precision) -> Comparison:
        """Compare, and where something differs once more, by how far roundings carry in this model.

        Rounding is measured by further runs whose weights are moved by drawn last digits.  It can be more than a limit
        allows where a gradient is zero in exact arithmetic (that of a bias before batch norm), or is one number whose
        terms cancel.
        """
        known = self.nudged if precision == "fp64" else ()
        comparison = compare(known)
        if comparison.is_equal:
            return comparison
        inside: InnerCasts = self.inside if precision == "fp64" else "as written"
        builds = [partial(_nudged, self.small, precision, draw) for draw in range(_NUDGES)]
        return compare([*known, *(self.run(precision, build, inside=inside) for build in builds)])

    def against_plain_torch(self) -> Comparison | None:
        """One process beside a loop without Weft's engine, dropout left out; None where torch has no such loop."""
        build = without_dropout(self.build)
        blueprint = build()
        if any(isinstance(module, torch.nn.Embedding) and module.sparse for module in blueprint.module.modules()):
            return None  # torch clips and steps no sparse gradients
        small = self.small
        candidate = self.run("fp64", build)
        loop = PlainLoop(recipe=small.recipe, plan=small.plan, label_range=small.label_range, inside=self.inside)
        reference = loop.run(blueprint, candidate.initial)

        def compare(nudged: Sequence[TrialResult]) -> Comparison:
            alike = [comparable(run, loop.steps) for run in nudged]
            return compare_results(reference, comparable(candidate, loop.steps), precision="fp64", nudged=alike)

        return replace(self.judge(compare, "fp64"), rounds_inside=self.rounds)


def _builder(small: SmallCase) -> Callable[[], Blueprint]:
    """Builds the small model, with no parameter that starts constant."""
    return lambda: perturb_constants(build_blueprint(small.recipe, Plan()))


def _nudged(small: SmallCase, precision: Precision, draw: int = 0) -> Blueprint:
    return nudge_weights(_builder(small)(), precision, draw=draw)


def _trial_alone(
    small: SmallCase,
    plan: Plan,
    build: Callable[[], Blueprint],
    *,
    steps: int = STEPS,
    inspect: Callable[[TrainingState], None] | None = None,
    inside: InnerCasts,
) -> Trial:
    labels = small.label_range
    return run_trial(small.recipe, plan, build, steps=steps, label_range=labels, inspect=inspect, inside=inside)
