"""Decide which of the priced layouts a training takes: problems that a space has with a plan, and the
plan of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from weft.config.plan import Plan
from weft.errors import PlanError
from weft.planning.price import CostModel
from weft.planning.search._convert import PlanSections, plan_of
from weft.planning.search._pins import with_pins
from weft.planning.search._space import Space
from weft.techniques.cost_terms import Layout


class Acceptance:
    """Asks a space what stands against the plans of layouts (`Space.refuses`), and counts what it hears."""

    def __init__(self, cost_model: CostModel, space: Space, global_batch_size: int, pins: Plan | None = None) -> None:
        self._cost_model, self._space, self._batch, self._pins = cost_model, space, global_batch_size, pins or Plan()
        self._sections = PlanSections()
        self.refused: Counter[str] = Counter()
        """Refusal → layouts that were refused for it."""

    def takes(self, layout: Layout, shares: Sequence[int] | None = None) -> bool:
        """Whether a training takes the plan of a layout.  What no plan can say is taken where nobody asks."""
        problem = self.problem(layout, shares)
        if problem:
            self.refused[problem] += 1
        return not problem

    def problem(self, layout: Layout, shares: Sequence[int] | None = None) -> str:
        """Return the problem with a layout's plan and the change to make; empty: none."""
        if self._space.refuses is None:
            return ""
        try:
            return self._space.refuses(self._stated(layout, shares))
        except PlanError as unsayable:
            return str(unsayable)

    def plan(self, layout: Layout, shares: Sequence[int] | None = None) -> Plan | None:
        """The plan of a layout; None where no plan can say it."""
        try:
            return self._stated(layout, shares)
        except PlanError:
            return None

    def _stated(self, layout: Layout, shares: Sequence[int] | None) -> Plan:
        if layout.pipeline > 1:
            layout = replace(layout, cuts=self._cost_model.model_cost(layout).cuts(layout))  # the ones that were priced
        plan = plan_of(layout, global_batch_size=self._batch, shares=shares, known=self._sections)
        return with_pins(plan, self._pins)
