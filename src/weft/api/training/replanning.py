"""Other plans for a training that runs: whether it can go on under one, and the plan for other devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.api.planning.describe import describe_blueprint
from weft.api.planning.first_looks import branches_by_first_looks, refuse_by_first_looks
from weft.api.training.step_times import StepTimes
from weft.comm.device import backend_for, device_for_rank
from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan, complete_plan, over_ranks, parse_plan
from weft.config.recipe import Recipe
from weft.formatting import format_seconds
from weft.model.blueprint import Blueprint
from weft.model.profile import Profile
from weft.planning.learned import keep_run, learned_here
from weft.planning.price import CostModel
from weft.planning.search import BetterPlan, better_plan, plan_for_devices
from weft.run.data import PreparedData
from weft.run.launch import threads_of_user
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.cost_terms import DATASHEET, Layout
from weft.verify.dry_run import trace_sends_or_reason
from weft.verify.program import program_of
from weft.watch.learning import BUSY, run_to_learn
from weft.watch.run_record import RunRecord
from weft.watch.store import remove_logs

_TRACED_RANKS = 16
"""Most ranks whose traffic is predicted; those of a larger world are drawn evenly from it."""


@dataclass(frozen=True, slots=True)
class PlannedData:
    """What belongs to a plan of a training."""

    prepared: PreparedData
    """Data, as they are read under the plan."""
    is_chosen: bool
    """Whether a search has chosen the plan: then another number of devices may have a very different one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanner:
    """What is known of a training that goes on under other plans: all that a plan is checked against."""

    recipe: Recipe
    blueprint: Blueprint
    facts: ModelFacts
    cluster: Cluster
    prepared: PreparedData

    def checked(self, plan: Plan) -> tuple[Plan, PlannedData]:
        """Return a plan complete under which this training could go on.

        Raises:
            WeftError: it does not fit the recipe, the model or this machine.
        """
        return self._completed(over_ranks(plan, None, num_accelerators=self.cluster.num_accelerators), is_chosen=False)

    def for_devices(
        self, before: Plan, num_devices: int, *, is_chosen: bool, fewest: int | None = None
    ) -> tuple[Plan, PlannedData]:
        """Return the plan for another number of devices (`weft.planning.search.plan_for_devices`).

        Raises:
            PlanError: there is none.
        """
        plan = plan_for_devices(
            before,
            num_devices,
            recipe=self.recipe,
            facts=self.facts,
            profile=self._profile,
            cluster=self.cluster,
            is_chosen=is_chosen,
            fewest=fewest,
        )
        plan, data = self._completed(plan, is_chosen=True)
        return plan, replace(data, is_chosen=is_chosen)

    def better(self, steps: StepTimes, *, most: int | None) -> tuple[BetterPlan, Plan, PlannedData]:
        """Return a plan that is better by this run's own steps (`weft.planning.search.better_plan`), as it was found
        and complete.  `most`: devices that it may have; None: all of the cluster.

        Raises:
            PlanError: none is better by more than the noise.
        """
        recipe = self.recipe
        if most is not None and most < (recipe.run.max_devices or most + 1):
            recipe = replace(recipe, run=replace(recipe.run, max_devices=most))
        now, earlier = steps.read()
        better = better_plan(now, earlier, recipe=recipe, facts=self.facts, profile=self._profile, cluster=self.cluster)
        return better, *self._completed(better.plan, is_chosen=True)

    def predicted(self, plan: str) -> dict[str, Any]:
        """Return what is predicted for a plan (TOML), as a run's telemetry has it
        (`weft.watch.store.GenerationFacts.predicted`)."""
        read = parse_plan(plan)
        learned, layout = learned_here(self.cluster), Layout.of(read)
        cost_model = CostModel(self._profile, self.cluster, calibration=learned.calibration(DATASHEET))
        prediction = cost_model.predict(layout, exact=True, spans=True)
        plain = CostModel(self._profile, self.cluster).predict(layout, exact=True) if learned.num_runs else prediction
        said = learned.line(prediction.step_seconds, plain.step_seconds)
        return {
            "learned": f" What it said is {said}." if said else "",
            "seconds": asdict(prediction.time),
            "spread": prediction.spread,
            "memory": [{**stage.kinds._asdict(), "device": stage.device} for stage in prediction.stages],
            "usable_bytes": prediction.usable_bytes,
            "traffic": self._traffic(read),
            "spans": [[s.rank, s.kind, s.chunk, s.microbatch, s.start, s.stop] for s in prediction.spans],
        }

    def learn(self, folder: Path) -> str:
        """Keep what a run that ended well took beside its price, for later predictions on this machine.

        Return the line to print; empty where there is nothing to say.  A run is never the worse for it: whatever goes
        wrong is the line.
        """
        try:
            record = RunRecord(folder)
            try:
                run = run_to_learn(record, self._profile, self.cluster)
            finally:
                record.close()
                remove_logs(folder)
            if isinstance(run, str):
                return f"learned   nothing: {run}" if run.startswith(BUSY) else ""
            keep_run(run, self.cluster)
            known = learned_here(self.cluster)
            runs = f"{known.num_runs} run{'s' * (known.num_runs != 1)}"
            took, priced = format_seconds(run.measured.step), format_seconds(run.priced.step)
            return f"learned   {took} a step where {priced} were priced; predictions are corrected by {runs} now"
        except Exception as error:
            return f"learned   nothing: {type(error).__name__}: {error}"

    def _traffic(self, plan: Plan) -> dict[str, dict[str, list[float]]]:
        """Axis → operation → [count, bytes] of one rank in a step, the mean over ranks; empty where nothing tells."""
        outline = trace_sends_or_reason(self.blueprint)
        if isinstance(outline, str):
            return {}
        world = plan.mesh.world_size
        ranks = range(0, world, -(-world // _TRACED_RANKS))
        sums: dict[str, dict[str, list[float]]] = {}
        for rank in ranks:
            sent = program_of(self.recipe, plan, outline, rank).traffic("reported")
            for (axis, operation, size_bytes), count in sent.items():
                pair = sums.setdefault(axis, {}).setdefault(operation, [0.0, 0.0])
                pair[0] += count / len(ranks)
                pair[1] += count * size_bytes / len(ranks)
        return sums

    @property
    def _profile(self) -> Profile:
        return describe_blueprint(self.blueprint, self.recipe).profile

    def _completed(self, plan: Plan, *, is_chosen: bool) -> tuple[Plan, PlannedData]:
        plan, _ = complete_plan(plan, self.recipe, {}, threads_of_user(), is_chosen=is_chosen)
        check_plan(plan, self.recipe, self.facts, None)
        check_runnable(plan)
        backend_for(device_for_rank(plan.compute.device, 0), wanted=plan.compute.backend)
        looked = self.recipe, plan, self.blueprint, self.prepared
        refuse_by_first_looks(*looked)
        prepared = replace(self.prepared, branches=branches_by_first_looks(*looked))
        return plan, PlannedData(prepared, is_chosen)
