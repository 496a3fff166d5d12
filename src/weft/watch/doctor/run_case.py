"""What the checks of a run look at: its record, its recipe and plan, the machine, and the planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import Cluster
from weft.config.plan import Plan, parse_plan
from weft.config.recipe import Recipe, parse_recipe
from weft.errors import WeftError
from weft.formatting import format_percent, format_seconds
from weft.model.description import description_of, facts_of, stored
from weft.planning.search import BetterPlan, CorrectedCosts, MeasuredSteps, better_plan
from weft.watch.accounting import own_times
from weft.watch.run_record import RunRecord
from weft.watch.store import GenerationFacts, StepWindow

LEAST_STEPS = 20
"""Recorded steps before the doctor says anything of the speed of a run."""
_DISTURBED = 0.1
"""Share of a step that other programs must take for steps to be judged by their means."""
_MEAN_OF = 5
"""Steps of such a mean."""


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """A run that is examined.  What is not known of it is None, and checks that need it stay silent."""

    record: RunRecord
    cluster: Cluster | None
    """Where it ran."""

    @property
    def facts(self) -> GenerationFacts:
        return self.record.facts

    @cached_property
    def window(self) -> StepWindow:
        """Newest steps of the newest generation as they were, had other programs taken no time: what the machine did is
        no fault of the run."""
        if not len(self.recorded.steps):
            return self.recorded
        took, wall = np.median(others_took(self.recorded)), np.nanmedian(self.recorded.column("wall"))
        # What they took is known by the second, and not by the step.
        return without_others(_means(self.recorded, _MEAN_OF) if took > _DISTURBED * wall else self.recorded)

    @cached_property
    def recorded(self) -> StepWindow:
        """Newest steps of the newest generation, without its first ones, which warm up, and rows that are means."""
        window = self.record.window
        keep = window.num_steps == 1
        keep[: min(3, max(0, len(keep) - LEAST_STEPS))] = False
        return window._replace(
            steps=window.steps[keep],
            num_steps=window.num_steps[keep],
            unix_times=window.unix_times[keep],
            values=window.values[keep],
        )

    @property
    def is_timed(self) -> bool:
        """Whether enough steps were recorded to judge their times."""
        return len(self.recorded.steps) >= LEAST_STEPS

    @cached_property
    def step_seconds(self) -> float:
        """Median time of a step without saves, evaluations and other programs; 0 where none was recorded."""
        if not len(self.window.steps):
            return self.record.usual_seconds
        return float(np.median(self._whole_steps))

    @property
    def _whole_steps(self) -> NDArray[np.float64]:
        wall = self.window.column("wall") - self.window.column("checkpoint")
        return np.nanmax(wall, axis=1).astype(np.float64)

    @cached_property
    def recipe(self) -> Recipe | None:
        try:
            return parse_recipe(self.record.recipe) if self.record.recipe else None
        except WeftError:
            return None

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the newest generation."""
        for text in (self.record.plan, self.facts.plan):
            try:
                if text:
                    return parse_plan(text)
            except WeftError:
                continue
        return None

    @cached_property
    def peak_share(self) -> float | None:
        """Share of the measured peak in the median step, 0 to 1; None where unknown."""
        facts = self.facts
        if facts.model_flops > 0 and facts.peak_flops > 0 and self.step_seconds > 0:
            return facts.model_flops / (facts.alone_flops or facts.peak_flops) / self.step_seconds
        shares = [report["peak_share"] for report in self.record.reports[-50:] if report.get("peak_share")]
        return float(np.median(shares)) if shares else None

    # ── what the planner says ────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def measured(self) -> MeasuredSteps | None:
        """The run's own steps, as the planner takes them; None where they are too few or the plan is unknown."""
        if self.plan is None or not self.is_timed:
            return None
        window, steps = self.window, self._whole_steps
        middle = float(np.median(steps))
        deviation = 1.4826 * float(np.median(np.abs(steps - middle)))
        waits = window.column("communication") + window.column("bubble")
        return MeasuredSteps(
            plan=self.plan,
            num_steps=len(steps),
            seconds=middle,
            noise=1.2533 * deviation / math.sqrt(len(steps)) / middle,
            exposed_seconds=float(np.nanmedian(waits)),
            optimizer_seconds=float(np.nanmedian(own_times(window, ["optimizer"]))),
            other_seconds=float(np.nanmedian(window.column("input") + window.column("idle"))),
        )

    @cached_property
    def costs(self) -> CorrectedCosts | None:
        """Predictions that are corrected by the run's own steps; None where the model or the machine is unknown."""
        if self.recipe is None or self.cluster is None or self.measured is None:
            return None
        try:
            described = description_of(self.recipe) or stored(self.recipe)
            if described is None:
                return None
            return CorrectedCosts(self.measured, profile=described.profile, cluster=self.cluster)
        except WeftError:
            return None

    def gain_of(self, plan: Plan) -> float | None:
        """Return the share of a step that another plan saves, 0 to 1, below 0 where it loses; None where it is not
        known, or the plan does not fit the memory."""
        if self.costs is None or self.measured is None:
            return None
        try:
            now, other = (self.costs.predict(each) for each in (self.measured.plan, plan))
        except WeftError:
            return None
        # Beside the corrected prediction of the plan that runs, and not beside its steps: corrections have limits.
        return 1 - self.costs.seconds(other) / self.costs.seconds(now) if other.fits else None

    def promise_of(self, change: str, gain: float) -> str:
        """Return the sentence on a change that the planner has priced."""
        seconds = (1 - gain) * self.step_seconds
        return (
            f"with {change} the planner, corrected by these steps, predicts {format_seconds(seconds)} a step,"
            f" {format_percent(100 * gain)} less"
        )

    def better(self) -> BetterPlan:
        """Return a better plan (`weft.planning.search.better_plan`), which keeps the precision.  Takes a second.

        Raises:
            PlanError: none is better by more than the noise, or the run is not known well enough.
        """
        from weft.errors import PlanError

        if self.recipe is None or self.cluster is None or self.measured is None:
            lacking = [
                name
                for name, thing in (
                    ("its recipe", self.recipe),
                    ("its cluster (--cluster)", self.cluster),
                    (f"{LEAST_STEPS} recorded steps", self.measured),
                )
                if thing is None
            ]
            raise PlanError(f"No better plan can be found without {', '.join(lacking)}.")
        described = description_of(self.recipe) or stored(self.recipe)
        if described is None:
            raise PlanError("No better plan can be found: its model was not described on this machine (weft describe).")
        return better_plan(
            self.measured,
            recipe=self.recipe,
            facts=described.facts if self.recipe.model.reference is None else facts_of(self.recipe),
            profile=described.profile,
            cluster=self.cluster,
        )


def others_took(window: StepWindow) -> NDArray[np.float32]:
    """Return the seconds in which a rank had no processor because other programs had it, at most: shape (steps, ranks).

    A rank cannot have lost more to them than they computed.
    """
    return np.minimum(np.nan_to_num(window.column("descheduled")), np.nan_to_num(window.column("others")))


def _means(window: StepWindow, number: int) -> StepWindow:
    """Return the means of so many steps each."""
    most = len(window.steps) // number * number
    values = window.values[:most].reshape(-1, number, *window.values.shape[1:])
    return window._replace(
        steps=window.steps[:most:number],
        num_steps=window.num_steps[:most:number],
        unix_times=window.unix_times[:most:number],
        values=np.nanmean(values, axis=1),
    )


def without_others(window: StepWindow) -> StepWindow:
    """Return steps as they had been, had other programs not computed meanwhile.

    Of what a rank computed they took the same share everywhere, of its waits for data as of its whole step; and its
    peers waited for the rank that lost most.
    """
    took = others_took(window)
    if not took.size or not took.any():
        return window
    most = took.max(axis=1, keepdims=True)
    values = window.values.copy()
    own_share = 1 - np.clip(took / np.maximum(np.nan_to_num(window.column("compute")), 1e-9), 0.0, 0.95)
    input_share = 1 - np.clip(took / np.maximum(np.nan_to_num(window.column("wall")), 1e-9), 0.0, 0.95)
    for index, column in enumerate(window.columns):
        kind, _, name = column.partition(":")
        now = values[:, :, index]
        if column == "wall":
            now[:] = np.maximum(now - most, 0.05 * now)
        elif kind in ("waits", "exposed", "total", "bubble") or column == "communication":
            now[:] = np.maximum(now - most, 0.0)
        elif column == "input":
            now[:] *= input_share
        elif column == "compute":
            now[:] *= own_share
        elif column == "descheduled":
            now[:] -= took
        elif kind == "phase":
            waits = window.column(f"waits:{name}")
            own = np.maximum(now - waits, 0.0)
            kept = own * (input_share if name == "data_wait" else own_share)
            now[:] = kept + np.maximum(waits - most, 0.0)
    return window._replace(values=values)


def groups_along(facts: GenerationFacts, axis: str) -> list[list[int]]:
    """Return the ranks of each group of a mesh axis: those whose other coordinates are equal."""
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for rank, about in enumerate(facts.ranks):
        coordinates: Mapping[str, int] = about.get("coordinates", {})
        others = tuple(sorted((name, index) for name, index in coordinates.items() if name != axis))
        groups.setdefault(others, []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def hosts_of(facts: GenerationFacts) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    hosts: dict[str, list[int]] = {}
    for rank, about in enumerate(facts.ranks):
        hosts.setdefault(str(about.get("host", "")), []).append(rank)
    return hosts
