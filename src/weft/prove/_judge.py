"""Put the ranks of a trial together, and judge two trials as the law of the house says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from weft.plan import Plan
from weft.prove._compare import TOLERANCES, assemble, compare
from weft.prove._trial import Trial

Kind = Literal["initial weight", "loss", "gradient", "gradient norm", "weight", "buffer", "validation loss"]
"""What can differ, in the order in which a step makes it."""

_MADE: tuple[Kind, ...] = ("initial weight", "loss", "gradient", "gradient norm")
"""What the first step makes, in order."""
_NOISE_FACTOR = 4.0
"""A lower precision may be so many times as far from one process as one process is from itself in fp64."""
_NOTHING = 1e-12
"""A gradient so small beside the whole, in fp64, is zero in exact arithmetic: in lower precisions it is noise."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What all ranks of a trial saw together."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    validation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Something that is not what one process computes."""

    kind: Kind
    name: str
    """Of the tensor; `step 2` for a loss or a norm."""
    relative: float
    limit: float
    step: int = 1
    """Optimizer step from 1, of losses and norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Largest relative difference of each kind, and everything beyond its limit."""

    precision: str
    largest: Mapping[Kind, float]
    largest_gradient: str
    """Name of the parameter whose gradient differs most."""
    num_gradients: int
    departures: tuple[Departure, ...]
    """In the order of `Kind`, then as found; empty: equal to one process."""

    @property
    def is_equal(self) -> bool:
        return not self.departures


def join_trials(trials: Sequence[Trial], plan: Plan) -> Outcome:
    """Put the ranks' pieces together.  Ranks that disagree about a loss or a norm give nan, which equals nothing."""

    def agreed(lists: list[list[float]]) -> list[float]:
        return [values[0] if len(set(values)) == 1 else math.nan for values in zip(*lists, strict=True)]

    return Outcome(
        initial=assemble([trial.initial for trial in trials]),
        gradients=assemble([trial.gradients for trial in trials]),
        state=assemble([trial.state for trial in trials]),
        losses=agreed([trial.losses for trial in trials]),
        norms=agreed([trial.gradient_norms for trial in trials]),
        validation=sum(trial.validation for trial in trials) / plan.mesh.tensor,
    )


def judge(
    wanted: Outcome, found: Outcome, *, precision: str, exact: Outcome | None = None, order: Sequence[str] = ()
) -> Verdict:
    """Compare what a plan computed with what one process did.

    In fp64 everything is held to 1e-10.  In lower precisions `exact`, one process in fp64, says how large rounding is:
    a tensor may differ by 1e-5 in fp32, or by four times the distance of one process from `exact`, whichever is
    more; gradients that are zero in exact arithmetic and weights after the steps (which an optimizer such as Adam
    moves by the sign of a rounding error) are not judged there, the loss curve that they make is.

    `order` lists parameters as the forward meets them.
    """
    limits = _Limits(wanted, exact, precision)
    differences: dict[Kind, dict[str, float]] = {
        "initial weight": _tensors(wanted.initial, found.initial, lambda name: exact is None),
        "loss": _steps(wanted.losses, found.losses),
        "gradient": _tensors(wanted.gradients, found.gradients, lambda name: name not in limits.unjudged),
        "gradient norm": _steps(wanted.norms, found.norms),
        "weight": _tensors(wanted.state, found.state, lambda name: exact is None and not name.startswith("buffer/")),
        "buffer": _tensors(wanted.state, found.state, lambda name: exact is None and name.startswith("buffer/")),
        "validation loss": _steps([wanted.validation], [found.validation]),
    }
    departures: list[Departure] = []
    for kind, values in differences.items():
        for name in sorted(values, key=lambda name: _position(name, order)):
            limit = limits.of(kind, name)
            if not values[name] <= limit:
                step = int(name.split()[1]) if name.startswith("step ") else 1
                departures.append(Departure(kind=kind, name=name, relative=values[name], limit=limit, step=step))
    departures.sort(key=_when)
    gradients = differences["gradient"]
    return Verdict(
        precision=precision,
        largest={kind: max(values.values(), default=0.0) for kind, values in differences.items()},
        largest_gradient=max(gradients, key=lambda name: gradients[name], default=""),
        num_gradients=len(gradients),
        departures=tuple(departures),
    )


def _when(departure: Departure) -> int:
    """What is made first stands first: later steps after everything of the first."""
    if departure.step > 1:
        return len(_MADE)
    return _MADE.index(departure.kind) if departure.kind in _MADE else len(_MADE) + 1


def _position(name: str, order: Sequence[str]) -> tuple[int, str]:
    if name.startswith("step "):
        return int(name.split()[1]), name
    return (order.index(name) if name in order else len(order)), name


def _bare(name: str) -> str:
    """`embedding.weight` of `gradient/embedding.weight`."""
    return name.partition("/")[2]


def _tensors(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], judged: Callable[[str], bool]
) -> dict[str, float]:
    mine = {name: tensor for name, tensor in wanted.items() if judged(name)}
    theirs = {name: tensor for name, tensor in found.items() if judged(name)}
    return {_bare(difference.name): difference.relative for difference in compare(mine, theirs)}


def _steps(wanted: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """Relative difference by step; numbers that are not finite on both sides alike differ infinitely."""
    values: dict[str, float] = {}
    for step, (one, other) in enumerate(zip(wanted, found, strict=True), 1):
        if one == other or (math.isnan(one) and math.isnan(other)):
            values[f"step {step}"] = 0.0
        else:
            relative = abs(one - other) / abs(one) if one else math.inf
            values[f"step {step}"] = relative if math.isfinite(relative) else math.inf
    return values


class _Limits:
    """How far a plan may be from one process."""

    def __init__(self, wanted: Outcome, exact: Outcome | None, precision: str) -> None:
        self._law = TOLERANCES.get(precision, 0.0)
        self._noise: dict[Kind, dict[str, float]] = {}
        self.unjudged: frozenset[str] = frozenset()
        """Gradients that are nothing but rounding noise in this precision."""
        if exact is None:
            return
        norms = {name: float(tensor.double().norm()) for name, tensor in exact.gradients.items()}
        whole = math.sqrt(sum(norm * norm for norm in norms.values()))
        self.unjudged = frozenset(name for name, norm in norms.items() if norm <= _NOTHING * whole)
        self._noise = {
            "loss": _steps(exact.losses, wanted.losses),
            "gradient": _tensors(exact.gradients, wanted.gradients, lambda name: name not in self.unjudged),
            "gradient norm": _steps(exact.norms, wanted.norms),
            "validation loss": _steps([exact.validation], [wanted.validation]),
        }

    def of(self, kind: Kind, name: str) -> float:
        noise = self._noise.get(kind)
        if not noise:
            return self._law
        # A single number or tensor may by chance lie close to the exact one, so the middle of all counts too.
        typical = max(statistics.median(noise.values()), *(self._noise["loss"].values()))
        return max(self._law, _NOISE_FACTOR * max(noise.get(name, 0.0), typical))
