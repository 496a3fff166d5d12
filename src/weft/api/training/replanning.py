"""Other plans for a training that runs: whether it can go on under one, and the plan for other devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.api.planning.describe import describe_blueprint
from weft.api.planning.first_looks import branches_by_first_looks, refuse_by_first_looks
from weft.comm.device import backend_for, device_for_rank
from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan, complete_plan, over_ranks
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.planning.search import plan_for_devices
from weft.run.data import PreparedData
from weft.run.launch import threads_of_user
from weft.techniques.check import check_plan, check_runnable


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanner:
    """What is known of a training that goes on under other plans: all that a plan is checked against."""

    recipe: Recipe
    blueprint: Blueprint
    facts: ModelFacts
    cluster: Cluster
    prepared: PreparedData

    def checked(self, plan: Plan) -> tuple[Plan, PreparedData]:
        """Return a plan complete under which this training could go on, and the data as they are read under it.

        Raises:
            WeftError: it does not fit the recipe, the model or this machine.
        """
        return self._completed(over_ranks(plan, None, num_accelerators=self.cluster.num_accelerators), is_chosen=False)

    def for_devices(
        self, before: Plan, num_devices: int, *, is_chosen: bool, fewest: int | None = None
    ) -> tuple[Plan, PreparedData]:
        """Return the plan for another number of devices (`weft.planning.search.plan_for_devices`).

        Raises:
            PlanError: there is none.
        """
        plan = plan_for_devices(
            before,
            num_devices,
            recipe=self.recipe,
            facts=self.facts,
            profile=describe_blueprint(self.blueprint, self.recipe).profile,
            cluster=self.cluster,
            is_chosen=is_chosen,
            fewest=fewest,
        )
        return self._completed(plan, is_chosen=True)

    def _completed(self, plan: Plan, *, is_chosen: bool) -> tuple[Plan, PreparedData]:
        plan, _ = complete_plan(plan, self.recipe, {}, threads_of_user(), is_chosen=is_chosen)
        check_plan(plan, self.recipe, self.facts, None)
        check_runnable(plan)
        backend_for(device_for_rank(plan.compute.device, 0), wanted=plan.compute.backend)
        looked = self.recipe, plan, self.blueprint, self.prepared
        refuse_by_first_looks(*looked)
        return plan, replace(self.prepared, branches=branches_by_first_looks(*looked))
