"""Joins the ranks of a trial, and compares two trials: a plan's with that of one process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from weft.config.plan import Plan
from weft.techniques.tensor.mesh_2d.shape import num_loss_replicas
from weft.verify.numerics._differences import TOLERANCES, assemble, compare
from weft.verify.numerics._trial import Trial

Quantity = Literal["initial weight", "loss", "gradient", "gradient norm", "weight", "buffer", "validation loss"]
"""Kinds of values that are compared, in the order in which a step computes them."""

_QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
_MADE: tuple[Quantity, ...] = ("initial weight", "loss", "gradient", "gradient norm")
"""Kinds of the first step, in the order in which it computes them."""
_NOISE_FACTOR = 4.0
"""A lower precision may be so many times as far from one process as one process is from itself in fp64."""
_NOTHING = 1e-12
"""A gradient so small beside the whole, in fp64, is zero in exact arithmetic: in lower precisions it is noise."""
_NOISY = 1e-2
"""A gradient that roundings move by so much of itself says nothing."""


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """The results of a trial, joined over all ranks."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    validation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A value beyond its limit: not what one process computes."""

    kind: Quantity
    name: str
    """Name of the tensor; `step 2` for a loss or a norm."""
    relative: float
    limit: float
    step: int = 1
    """Optimizer step from 1, of losses and norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Largest relative difference of each kind, and everything beyond its limit."""

    precision: str
    largest: Mapping[Quantity, float]
    largest_gradient: str
    """Name of the parameter whose gradient differs most."""
    num_gradients: int
    num_noisy: int = 0
    """Gradients that rounding alone moves by more than 1 %: held to their limits, and left out of `largest`."""
    rounds_inside: str = ""
    """Operators of the model that round to a narrower type although it runs in fp64.  They set the limits."""
    mismatches: tuple[Mismatch, ...]
    """Ordered by `Quantity`, then as the forward meets them; empty: equal to one process."""

    @property
    def is_equal(self) -> bool:
        return not self.mismatches


def join_trials(trials: Sequence[Trial], plan: Plan) -> TrialResult:
    """Put the ranks' shards together.  Ranks that disagree about a loss or a norm give nan, which equals nothing."""

    def agreed(lists: list[list[float]]) -> list[float]:
        return [values[0] if len(set(values)) == 1 else math.nan for values in zip(*lists, strict=True)]

    return TrialResult(
        initial=assemble([trial.initial for trial in trials]),
        gradients=assemble([trial.gradients for trial in trials]),
        state=assemble([trial.state for trial in trials]),
        losses=agreed([trial.losses for trial in trials]),
        norms=agreed([trial.gradient_norms for trial in trials]),
        validation=sum(trial.validation for trial in trials) / num_loss_replicas(plan),
    )


def compare_results(
    reference: TrialResult,
    candidate: TrialResult,
    *,
    precision: str,
    exact: TrialResult | None = None,
    nudged: Sequence[TrialResult] = (),
    order: Sequence[str] = (),
) -> Comparison:
    """Compare what a plan computed with what one process did.

    In fp64 everything is held to 1e-10.  In lower precisions `exact`, one process in fp64, says how large rounding is:
    a tensor may differ by 1e-5 in fp32, or by four times the distance of one process from `exact`, whichever is
    more; gradients that are zero in exact arithmetic and weights after the steps (which an optimizer such as Adam
    moves by the sign of a rounding error) are not compared there; the loss curve that they give is.

    `nudged` are runs of one process, in the same precision, whose weights were moved by a rounding (`nudge_weights`),
    and a plan may differ by four times what that does.  In fp64 it is a rounding of what the model computes in inside,
    where it cannot be kept out.  In lower precisions it is their own: that one process lies close to `exact` may be
    chance, above all in a single number whose terms cancel.

    `order` lists parameters as the forward meets them.
    """
    limits = _CheckLimits(reference, exact, nudged, precision)
    differences = _distances(reference, candidate, lambda name: name not in limits.unjudged)
    if exact is None:
        differences["initial weight"] = _tensors(reference.initial, candidate.initial, lambda name: True)
        differences |= _state_distances(reference, candidate)
    mismatches: list[Mismatch] = []
    for kind in _QUANTITIES:
        values = differences.get(kind, {})
        for name in sorted(values, key=lambda name: _position(name, order)):
            limit = limits.of(kind, name)
            if not values[name] <= limit:  # not ">": nan is beyond every limit
                step = int(name.split()[1]) if name.startswith("step ") else 1
                mismatches.append(Mismatch(kind=kind, name=name, relative=values[name], limit=limit, step=step))
    mismatches.sort(key=_when)
    gradients = differences["gradient"]
    clear = {name: value for name, value in gradients.items() if limits.of("gradient", name) < _NOISY}
    shown = differences | {"gradient": clear}
    return Comparison(
        precision=precision,
        largest={kind: max(shown.get(kind, {}).values(), default=0.0) for kind in _QUANTITIES},
        largest_gradient=max(clear, key=lambda name: clear[name], default=""),
        num_gradients=len(gradients),
        num_noisy=len(gradients) - len(clear),
        mismatches=tuple(mismatches),
    )


def _when(mismatch: Mismatch) -> int:
    """Return the sort key of a mismatch: what is computed first comes first, later steps after all of the first."""
    if mismatch.step > 1:
        return len(_MADE)
    return _MADE.index(mismatch.kind) if mismatch.kind in _MADE else len(_MADE) + 1


def _position(name: str, order: Sequence[str]) -> tuple[int, str]:
    if name.startswith("step "):
        return int(name.split()[1]), name
    return (order.index(name) if name in order else len(order)), name


def _bare(name: str) -> str:
    """`embedding.weight` of `gradient/embedding.weight`."""
    return name.partition("/")[2]


def _tensors(
    reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor], is_compared: Callable[[str], bool]
) -> dict[str, float]:
    ours = {name: tensor for name, tensor in reference.items() if is_compared(name)}
    theirs = {name: tensor for name, tensor in candidate.items() if is_compared(name)}
    return {_bare(difference.name): difference.relative for difference in compare(ours, theirs)}


def _steps(reference: Sequence[float], candidate: Sequence[float]) -> dict[str, float]:
    """Relative difference by step; numbers that are not finite on both sides alike differ infinitely."""
    values: dict[str, float] = {}
    for step, (one, other) in enumerate(zip(reference, candidate, strict=True), 1):
        if one == other or (math.isnan(one) and math.isnan(other)):
            values[f"step {step}"] = 0.0
        else:
            relative = abs(one - other) / abs(one) if one else math.inf
            values[f"step {step}"] = relative if math.isfinite(relative) else math.inf
    return values


def _distances(
    one: TrialResult, other: TrialResult, is_compared: Callable[[str], bool]
) -> dict[Quantity, dict[str, float]]:
    """Differences in all that every precision is judged by."""
    return {
        "loss": _steps(one.losses, other.losses),
        "gradient": _tensors(one.gradients, other.gradients, is_compared),
        "gradient norm": _steps(one.norms, other.norms),
        "validation loss": _steps([one.validation], [other.validation]),
    }


def _state_distances(one: TrialResult, other: TrialResult) -> dict[Quantity, dict[str, float]]:
    """Differences in what the steps leave."""
    return {
        "weight": _tensors(one.state, other.state, lambda name: not name.startswith("buffer/")),
        "buffer": _tensors(one.state, other.state, lambda name: name.startswith("buffer/")),
    }


class _CheckLimits:
    """Largest differences from one process that a plan may have."""

    def __init__(
        self, reference: TrialResult, exact: TrialResult | None, nudged: Sequence[TrialResult], precision: str
    ) -> None:
        self._law = TOLERANCES.get(precision, 0.0)
        self.unjudged: frozenset[str] = frozenset()
        """Gradients that are nothing but rounding noise in this precision."""
        if exact is not None:
            norms = {name: float(tensor.double().norm()) for name, tensor in exact.gradients.items()}
            # A key bias has no effect on softmax: its gradient is zero in exact arithmetic, and noise in a lower
            # precision.
            whole = math.sqrt(sum(norm * norm for norm in norms.values()))
            self.unjudged = frozenset(name for name, norm in norms.items() if norm <= _NOTHING * whole)
        self._noise: dict[Quantity, dict[str, float]] = {}
        # The noise of a tensor is the largest distance of any of these runs from the reference: each is a draw of
        # rounding.
        for other in nudged if exact is None else (exact, *nudged):
            distances = _distances(other, reference, lambda name: name not in self.unjudged)
            if exact is None:
                distances |= _state_distances(other, reference)
            for kind, values in distances.items():
                known = self._noise.setdefault(kind, {})
                known |= {name: max(value, known.get(name, 0.0)) for name, value in values.items()}

    def of(self, kind: Quantity, name: str) -> float:
        noise = self._noise.get(kind)
        if not noise:
            return self._law
        # A single number or tensor may by chance lie close to the exact one, so the middle of all counts too.
        typical = max(statistics.median(noise.values()), *(self._noise["loss"].values()))
        return max(self._law, _NOISE_FACTOR * max(noise.get(name, 0.0), typical))
