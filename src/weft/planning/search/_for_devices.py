"""The plan of a running training for another number of devices: what is left of them, or more than before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan, plan_settings
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.model.profile import Profile
from weft.planning.price import CostModel, Prediction
from weft.planning.search._choose import choose_plan, crowded, find_candidates
from weft.planning.search._pins import with_pins
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.compute.settings import THREADS
from weft.techniques.cost_terms import DATASHEET, Layout
from weft.techniques.data.settings import MicrobatchPlan, even_shares

_OPEN = ("mesh.replicate", "mesh.shard", "microbatch.size", "microbatch.per_step")
"""Settings that always follow the number of devices."""
_RELAXED = ("mesh.expert", "mesh.context", "mesh.pipeline", "mesh.tensor")
"""Axes of the user's that are given up for a number of devices that they do not divide, one after another."""

_LOOKED_AT = 8
"""Plans of a search that are looked at, the best first."""


def plan_for_devices(
    before: Plan,
    num_devices: int,
    *,
    recipe: Recipe,
    facts: ModelFacts,
    profile: Profile,
    cluster: Cluster,
    is_chosen: bool = False,
    fewest: int | None = None,
) -> Plan:
    """Return the plan under which a training goes on with another number of devices.

    The global batch, the order of samples and the schedule stay: the plan only says who does which part.  A plan that
    the user has written keeps its style where it can: the same axes of the model, ZeRO stage and settings, other data
    ranks, and where the batch cannot be divided evenly unequal shares of it.  Otherwise a search chooses, within what
    the user has given of it as far as that fits the number.  Needs no torch and no processes; takes less than a second.

    Args:
        before: the plan so far, complete.
        num_devices: one rank for each.
        facts: of the recipe's model.
        profile: of the same, which prices the plans (`weft.model.description.Description.profile`).
        cluster: devices that there are now.  It may have more than `num_devices`.
        is_chosen: a search has made `before`: only the settings that its `origins` name are the user's.
        fewest: so many ranks are enough, where none fits `num_devices` exactly, and where the recipe's
            `run.min_devices` allows so few; by default there must be a plan for exactly `num_devices`.

    Raises:
        PlanError: no plan fits.  It says why, and for how many devices there is one.
    """
    if num_devices < 1:
        raise PlanError(f"a run needs at least 1 device, and {num_devices} are left.")
    if cluster.has_accelerators and num_devices > cluster.num_devices:
        has = f"{cluster.num_devices} device{'s' if cluster.num_devices > 1 else ''}"
        raise PlanError(f"{num_devices} devices: {cluster.summary} has {has}. Use at most {cluster.num_devices}.")
    least, most = recipe.run.min_devices, recipe.run.max_devices
    if num_devices < least:
        raise PlanError(f"run.min_devices = {least} in the recipe, and {num_devices} would be left. Lower it.")
    if most is not None and num_devices > most:
        raise PlanError(f"run.max_devices = {most} in the recipe, and {num_devices} are more. Raise it.")
    refit = _Refit(before, recipe, facts, profile, cluster, is_chosen)
    for count in range(num_devices, max(least, fewest or num_devices) - 1, -1):
        plan = refit.plan(count)
        if plan is not None:
            return plan
    raise refit.refusal(num_devices)


class _Refit:
    """Looks for plans of one training, for several numbers of devices."""

    def __init__(
        self, before: Plan, recipe: Recipe, facts: ModelFacts, profile: Profile, cluster: Cluster, is_chosen: bool
    ) -> None:
        self._before = before
        self._recipe = recipe
        self._facts = facts
        self._profile = profile
        self._cluster = cluster
        self._is_chosen = is_chosen

    def plan(self, count: int) -> Plan | None:
        """Return the plan for exactly so many devices; None where there is none."""
        if not self._is_chosen and (plan := self._same_style(count)) is not None:
            return plan
        return next((plan for pins in self._pins(count) if (plan := self._searched(count, pins)) is not None), None)

    def refusal(self, count: int) -> PlanError:
        """Return why there is no plan for so many devices, and the numbers for which there is one."""
        others = [number for number in range(count - 1, 0, -1) if self.plan(number) is not None][:1]
        more = range(count + 1, self._cluster.num_devices + 1)
        others += [number for number in more if self.plan(number) is not None][:1]
        try:
            choose_plan(self._recipe, self._cluster, self._facts, count, profile=self._profile)
            why = f"no plan for {count} devices can train this recipe."
        except PlanError as error:
            why = str(error).partition("\nUse ")[0] if others else str(error)
        if not others:
            return PlanError(why)
        return PlanError(f"{why}\nThere is a plan for {' and for '.join(map(str, others))}.")

    def _same_style(self, count: int) -> Plan | None:
        """The plan before with other data ranks, and microbatches no larger than they were."""
        before, mesh = self._before, self._before.mesh
        model_ranks = mesh.world_size // mesh.data
        if count % model_ranks:
            return None
        data = count // model_ranks
        replicate, shard = data, 1
        if mesh.shard > 1:
            # Copies of a sharded model keep their size where that divides the data ranks.
            replicate, shard = (data // mesh.shard, mesh.shard) if data % mesh.shard == 0 else (1, data)
        plan = replace(before, mesh=replace(mesh, replicate=replicate, shard=shard))
        plans = [plan] if data == mesh.data else [replace(plan, microbatch=part) for part in self._microbatches(data)]
        accepted = [plan for plan in plans if self._is_accepted(plan, count) and self._fits(plan, count)]
        return min(accepted, key=lambda plan: self._predict(plan, count).step_seconds, default=None)

    def _microbatches(self, data: int) -> list[MicrobatchPlan]:
        """Every way to share the batch out over so many data ranks as evenly as can be, the largest microbatches
        first."""
        batch, largest = self._recipe.batch.global_batch_size, self._before.microbatch.size
        sizes = [size for size in range(largest, 0, -1) if batch % size == 0 and batch // size >= data]
        return [MicrobatchPlan.of(size, even_shares(batch // size, data)) for size in sizes]

    def _pins(self, count: int) -> Iterator[Plan]:
        """The plan before with fewer and fewer settings that count as given (its `origins`)."""
        settings = plan_settings()
        default, before = Plan(), self._before
        given = {
            setting.key
            for setting in settings
            if setting.key in before.origins or (not self._is_chosen and setting.of(before) != setting.of(default))
        }
        given -= {*_OPEN, THREADS} if self._is_chosen or count > before.mesh.world_size else {*_OPEN}
        yield self._pinned(given)
        for axis in _RELAXED:
            if axis in given:
                # With an axis go the settings that have a meaning along it only.
                section = f"{axis.removeprefix('mesh.')}_parallel"
                given = {key for key in given if key != axis and key.partition(".")[0] != section}
                yield self._pinned(given)
        if given:
            yield self._pinned({key for key in given if key.startswith("compute.")})

    def _pinned(self, given: set[str]) -> Plan:
        before = self._before
        plan = Plan(origins={key: before.origins.get(key, "the plan before") for key in sorted(given)})
        for setting in plan_settings():
            if setting.key in given:
                plan = setting.set(plan, setting.of(before))
        return plan

    def _searched(self, count: int, pins: Plan) -> Plan | None:
        """The best plan for exactly so many devices that has the given settings."""
        mesh = pins.mesh
        if count % (mesh.tensor * mesh.pipeline * mesh.context):
            return None
        # A search over all splits at once is quicker, and may leave devices idle: then they are looked at one by one.
        for processes in (None, count) if count == self._cluster.num_devices else (count,):
            try:
                candidates = find_candidates(
                    self._recipe, self._cluster, self._facts, processes, self._profile, pins, DATASHEET, top=_LOOKED_AT
                )
                plans = [with_pins(each.plan, pins) for each in candidates if each.plan is not None]
            except PlanError:
                return None
            for plan in plans:
                if self._is_accepted(plan, count):
                    return replace(plan, origins=pins.origins)
        return None

    def _is_accepted(self, plan: Plan, count: int) -> bool:
        try:
            check_plan(plan, self._recipe, self._facts, count)
            check_runnable(plan)
        except PlanError:
            return False
        return True

    def _fits(self, plan: Plan, count: int) -> bool:
        """Whether a plan is predicted to find memory.  Where the plan before was not, and ran, that says nothing."""
        before = self._before.mesh.world_size
        return self._has_memory(plan, count) or (
            before <= self._cluster.num_devices and not self._has_memory(self._before, before)
        )

    def _has_memory(self, plan: Plan, count: int) -> bool:
        return self._predict(plan, count).fits

    def _predict(self, plan: Plan, count: int) -> Prediction:
        cluster = self._cluster if count <= self._cluster.num_devices else crowded(self._cluster, count)
        return CostModel(self._profile, cluster, calibration=DATASHEET).predict(Layout.of(plan))
