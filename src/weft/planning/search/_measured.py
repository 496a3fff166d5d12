"""A better plan for a run whose steps have been measured: predictions are corrected by what its own steps took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan, plan_settings
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.formatting import format_percent, format_seconds
from weft.model.profile import Profile
from weft.planning.price import CostModel, Prediction
from weft.planning.search._choose import choose_plan, crowded
from weft.planning.search._pins import searched, with_pins
from weft.techniques.check import mesh_sizes
from weft.techniques.compute.settings import THREADS, ComputePlan
from weft.techniques.cost_terms import DATASHEET, WEFT, Layout

_LOOKED_AT = 32
"""Plans of the search whose predictions are corrected."""
_LARGEST_FACTOR = 4.0
"""A correction is at most this, or its inverse: beyond, the term was not what its name says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps of a run under one plan, as rank 0 has measured them.  Times are medians per step."""

    plan: Plan
    num_steps: int
    seconds: float
    """Time of a step without evaluations and saves."""
    noise: float
    """Standard error of `seconds`, as a share of it."""
    exposed_seconds: float
    """Time inside waits for collectives and messages."""
    optimizer_seconds: float
    other_seconds: float
    """Time that no plan changes: waiting for data, reports."""

    @property
    def compute_seconds(self) -> float:
        """Time of forward and backward alone."""
        return max(0.0, self.seconds - self.exposed_seconds - self.optimizer_seconds - self.other_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterPlan:
    """A plan that is faster than the one that runs by more than measurements and predictions vary."""

    plan: Plan
    seconds: float
    """Time of a step under it: predicted, and corrected by what this run has measured; or measured."""
    noise: float
    """Standard error of `seconds`, as a share of it."""
    is_measured: bool = False
    """Whether the run has been under this plan before, so that `seconds` was measured."""
    before: MeasuredSteps
    predicted_before: float
    """Predicted time of a step under the plan that runs, uncorrected."""

    @property
    def gain(self) -> float:
        """Share of a step's time that is saved."""
        return 1 - self.seconds / self.before.seconds

    @property
    def margin(self) -> float:
        """Share of a step that two standard errors of the comparison make up."""
        return 2 * math.hypot(self.before.noise, self.noise)

    def lines(self) -> list[str]:
        """Return what was measured and what is predicted, for the terminal."""
        word = "measured" if self.is_measured else "predicted"
        basis = "earlier in this run" if self.is_measured else "with these measurements"
        return [
            _measured_line(self.before, self.predicted_before),
            f"best      {mesh_sizes(self.plan)}, {self.plan.data_parallel.stage_name}: {word}"
            f" {format_seconds(self.seconds)} a step {basis}, {format_percent(100 * self.gain)} less",
        ]


def better_plan(
    before: MeasuredSteps,
    earlier: Sequence[MeasuredSteps] = (),
    *,
    recipe: Recipe,
    facts: ModelFacts,
    profile: Profile,
    cluster: Cluster,
) -> BetterPlan:
    """Return a plan that is better than the one that runs.  Needs no torch.

    Each part of a prediction (compute, waiting for others, optimizer) is scaled by what that part took under the plan
    that runs, over what was predicted for it.  A plan under which the run has been before counts with its measured
    time.

    Args:
        before: steps under the plan that runs.
        earlier: steps of this run under other plans.

    Raises:
        PlanError: no plan is better by more than the noise.  It says what was measured, and the best that was found.
    """
    correction = CorrectedCosts(before, profile=profile, cluster=cluster)
    predicted = correction.predicted_seconds
    pins = _kept_settings(before.plan)
    choice = choose_plan(recipe, cluster, facts, profile=profile, pins=pins, top=_LOOKED_AT)
    measured = {_sameness(steps.plan): steps for steps in earlier}
    measured.pop(_sameness(before.plan), None)
    found = [
        BetterPlan(plan=steps.plan, seconds=steps.seconds, noise=steps.noise, is_measured=True, before=before,
                   predicted_before=predicted)
        for steps in measured.values()
    ]  # fmt: skip
    for rival in choice.rivals:
        if rival.plan is None or _sameness(rival.plan) in (*measured, _sameness(before.plan)):
            continue
        plan, seconds = with_pins(rival.plan, pins), correction.seconds(rival.prediction)
        found.append(
            BetterPlan(plan=plan, seconds=seconds, noise=WEFT.spread / 2, before=before, predicted_before=predicted)
        )
    best = max(found, key=lambda plan: plan.gain - plan.margin, default=None)
    if best is None or best.gain <= best.margin:
        raise PlanError(_refusal(before, predicted, best))
    return best


class CorrectedCosts:
    """Predictions of plans of a run, corrected by factors of its own steps over their prediction."""

    def __init__(self, measured: MeasuredSteps, *, profile: Profile, cluster: Cluster) -> None:
        """Learn the factors.

        Raises:
            PlanError: the plan that runs cannot be priced on the cluster.
        """
        self._cost_model = CostModel(profile, _roomy(cluster, measured.plan), calibration=DATASHEET)
        prediction = self.predict(measured.plan)
        compute, exposed, optimizer, _ = _parts(prediction)
        self.predicted_seconds = prediction.step_seconds
        self._other = measured.other_seconds
        self._compute = _factor(measured.compute_seconds, compute)
        # Without waits there is nothing to learn of them: then they are as slow as everything else.
        self._exposed = _factor(measured.exposed_seconds, exposed) if exposed else self._compute
        self._optimizer = _factor(measured.optimizer_seconds, optimizer)

    def predict(self, plan: Plan) -> Prediction:
        """Return what is predicted of a plan without corrections.  Raises PlanError where it cannot be priced."""
        return self._cost_model.predict(Layout.of(plan), exact=True)

    def seconds(self, prediction: Prediction) -> float:
        """Return the seconds of a step, corrected."""
        compute, exposed, optimizer, offload = _parts(prediction)
        corrected = self._compute * compute + self._exposed * exposed + self._optimizer * optimizer
        return corrected + offload + self._other


def _parts(prediction: Prediction) -> tuple[float, float, float, float]:
    """Seconds of compute, of waiting for others, of the optimizer and of offloading."""
    time = prediction.time
    compute = time.ideal + time.matrix_shapes + time.memory_bound + time.recompute + time.other
    exposed = time.tensor + time.context + time.expert + time.pipeline + time.bubble + time.data
    return compute, exposed, time.optimizer, time.offload


def _factor(measured: float, predicted: float) -> float:
    if predicted <= 0 or measured <= 0:
        return 1.0
    return min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, measured / predicted))


def _refusal(before: MeasuredSteps, predicted: float, best: BetterPlan | None) -> str:
    line = _measured_line(before, predicted).removeprefix("measured  ")
    if best is None:
        return f"No other plan fits. Measured: {line}."
    word = "measured" if best.is_measured else "predicted with these measurements"
    sizes = f"{mesh_sizes(best.plan)}, {best.plan.data_parallel.stage_name}"
    compared = f"{format_percent(100 * abs(best.gain))} {'less' if best.gain > 0 else 'more'}"
    return (
        f"No plan is better by more than {format_percent(100 * best.margin)} of a step, which measurements and"
        f" predictions vary by.\nMeasured: {line}.\nNext: {sizes}, {word}: {format_seconds(best.seconds)} a step,"
        f" {compared}."
    )


def _measured_line(measured: MeasuredSteps, predicted: float) -> str:
    spread = format_percent(100 * max(0.001, measured.noise))
    return (
        f"measured  {mesh_sizes(measured.plan)}, {measured.plan.data_parallel.stage_name}:"
        f" {format_seconds(measured.seconds)} a step ± {spread} over {measured.num_steps} steps"
        f" ({format_seconds(predicted)} was predicted)"
    )


def _roomy(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster, with as many devices as the plan that runs has ranks."""
    world = plan.mesh.world_size
    return crowded(cluster, world) if world > cluster.num_devices and not cluster.has_accelerators else cluster


def _kept_settings(plan: Plan) -> Plan:
    """The settings of the plan that runs which a better one keeps: what decides about numbers (precision, compression,
    local steps), and where ranks compute."""
    kept = Plan(origins={})
    for setting in plan_settings():
        # Of data ranks, search only chooses what leaves the numbers alone, but for a codec.
        is_numeric = setting.section == "data_parallel" and (
            setting.key not in searched() or setting.name == "compression"
        )
        is_own = setting.section == "compute" or is_numeric
        if is_own and setting.key != THREADS and setting.of(plan) != setting.of(kept):
            kept = setting.set(kept, setting.of(plan))
            kept = replace(kept, origins={**kept.origins, setting.key: "the plan before"})
    precision = "compute.precision"
    return replace(kept, origins={**kept.origins, precision: "the plan before"})


def _sameness(plan: Plan) -> str:
    """Digits that are the same for plans that only differ in what no price depends on."""
    return replace(plan, compute=ComputePlan(precision=plan.compute.precision)).digest
