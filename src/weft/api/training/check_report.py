"""The report of a check, as lines for a person and as JSON for a program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.config.document import Json
from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.techniques.check import mesh_sizes
from weft.verify.numerics import STEPS, Comparison, Mismatch, SmallCase

_INDENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFailure:
    """The first thing that is not what one process computes."""

    precision: str
    mismatch: Mismatch | None
    """None: the ranks stopped with an error instead."""
    others: int
    """How much else differs."""
    cause: str
    """The likely cause, or the error."""
    needs: tuple[str, ...]
    """Techniques without which it does not happen; found only in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Whether a plan computes what one process computes."""

    plan: Plan
    """The plan that was run: the given one, scaled down."""
    lines: tuple[str, ...]
    """Lines about the trial: plan and model, and their simplifications."""
    comparisons: tuple[Comparison, ...]
    """One per precision, in the order in which they were run, up to the first that is not equal."""
    failure: CheckFailure | None
    seconds: float

    @property
    def is_equal(self) -> bool:
        return self.failure is None

    def __str__(self) -> str:
        return "\n".join((*self.lines, *self.result_lines()))

    def result_lines(self) -> list[str]:
        """One line when equal; else what differs first, and why."""
        if self.failure is None:
            exact, *rounded = self.comparisons
            text = f"{exact.largest['gradient']:.1e} over {exact.num_gradients} tensors in {exact.precision}"
            rest = "".join(
                f", {comparison.largest['gradient']:.1e} in {comparison.precision}" for comparison in rounded
            )
            rest += "".join(
                f"; rounding alone moves {comparison.num_noisy} by more than 1 % in {comparison.precision}"
                for comparison in self.comparisons
                if comparison.num_noisy
            )
            line = f"gradients equal one process: largest relative difference {text}{rest}  ({self.seconds:.1f} s)"
            rounds = f"{exact.rounds_inside}, which sets the limits in fp64" if exact.rounds_inside else ""
            return [_labelled("check", line), *([_labelled("", rounds)] if rounds else [])]
        first, *others = self._why()
        return [_labelled("check", first), *(_labelled("", line) for line in others)]

    def _why(self) -> Iterator[str]:
        assert self.failure is not None
        failure, mismatch = self.failure, self.failure.mismatch
        if mismatch is None:
            yield f"the plan does not run  ({self.seconds:.1f} s)"
            yield from failure.cause.splitlines()
        else:
            name = mismatch.name if mismatch.name.startswith("step ") else f"of {mismatch.name}"
            what = f"{mismatch.kind} {name} differs from one process by {mismatch.relative:.1e}"
            inside = self.comparisons[-1].rounds_inside
            why = f", because {inside}" if inside else ""
            limit = f"the limit in {failure.precision} is {mismatch.limit:.0e}{why}"
            rest = f"; {failure.others} more differ" if failure.others else ""
            yield f"{what} ({limit}){rest}  ({self.seconds:.1f} s)"
            if failure.cause:
                yield f"likely cause: {failure.cause}"
        if failure.needs:
            yield f"it takes {' and '.join(failure.needs)}: the rest of the plan makes no difference"

    def to_json(self) -> dict[str, Json]:
        """Everything, for `--json`."""
        failure = self.failure
        return {
            "equal": self.is_equal,
            "seconds": round(self.seconds, 3),
            "processes": self.plan.mesh.world_size,
            "steps": STEPS,
            "what": list(self.lines),
            "precisions": [_comparison_json(comparison) for comparison in self.comparisons],
            "failure": None
            if failure is None
            else {
                "precision": failure.precision,
                "first": None if failure.mismatch is None else _mismatch_json(failure.mismatch),
                "others": failure.others,
                "cause": failure.cause,
                "needs": list(failure.needs),
            },
        }


def _comparison_json(comparison: Comparison) -> dict[str, Json]:
    return {
        "precision": comparison.precision,
        "equal": comparison.is_equal,
        "gradients": comparison.num_gradients,
        "moved_by_rounding": comparison.num_noisy,
        "largest_gradient": comparison.largest_gradient,
        "rounds_inside": comparison.rounds_inside,
        "largest": {kind: _number(value) for kind, value in comparison.largest.items()},
    }


def _mismatch_json(mismatch: Mismatch) -> dict[str, Json]:
    return {
        "kind": mismatch.kind,
        "name": mismatch.name,
        "step": mismatch.step,
        "relative": _number(mismatch.relative),
        "limit": mismatch.limit,
    }


def _number(value: float) -> float | None:
    """JSON has no infinity: None stands for it."""
    return value if math.isfinite(value) else None


def describe_case(
    recipe: Recipe, plan: Plan, facts: ModelFacts, small: SmallCase, small_facts: ModelFacts
) -> list[str]:
    """Return the lines that describe the plan and the model."""
    sizes = mesh_sizes(plan)
    scaled = mesh_sizes(small.plan)
    world = small.plan.mesh.world_size
    how = f"{sizes}; scaled down to {scaled}" if scaled != sizes else sizes
    lines = [_labelled("plan", f"{how} = {world} process{'es' if world > 1 else ''}")]
    if recipe.model.factory is None:
        whole, part = _model(facts) or _model(small_facts), _model(small_facts)
        lines.append(_labelled("model", f"{facts.name} of {whole}, shrunk to {part}" if whole != part else whole))
    lines += [_labelled("note", note) for note in small.notes]
    if world == 1:
        lines += _nothing_split(plan)
    return lines


def _nothing_split(plan: Plan) -> list[str]:
    """Return a line: a check of one process proves nothing of a split, and which command would."""
    if plan.mesh.world_size == 1:
        why, instead = "the plan is one process", "Name a split: --set plan.mesh.replicate=2, or --plan FILE"
    else:
        why, instead = "scaled down it is one process", "Allow more: --processes 2, or leave --processes out"
    text = f"{why}, so nothing is proved of a split: only of microbatches, recomputation, precision and compilation"
    return [_labelled("note", text), _labelled("", f"{instead}.")]


def _model(facts: ModelFacts) -> str:
    parts: list[Any] = []
    if facts.num_blocks:
        parts.append(f"{facts.num_blocks:,} block{'s' if facts.num_blocks > 1 else ''}")
    if facts.hidden_size:
        parts.append(f"width {facts.hidden_size:,}")
    if facts.num_parameters:
        parts.append(f"{facts.num_parameters:,} parameters")
    return ", ".join(parts)


def _labelled(label: str, text: str) -> str:
    return f"{label.ljust(_INDENT)}{text}"
