"""Whether a plan fits a recipe and a world: every refusal with its numbers, its reason and the change to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.config.document import format_value
from weft.config.plan import ModelFacts, Plan, plan_settings
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.techniques.contract import Case
from weft.techniques.registry import TECHNIQUES


def check_plan(plan: Plan, recipe: Recipe, facts: ModelFacts, world_size: int | None = None) -> None:
    """Raise unless the plan can train the recipe without changing its mathematics.

    Needs no torch and no processes.  `world_size` is the number of processes, where it is known.

    Raises:
        PlanError: for the first conflict found; the message has the numbers, the reason and the computed change.
    """
    case = Case(plan, recipe, facts, world_size)
    for technique in TECHNIQUES:
        technique.check_model(case)
    for check in _CHECKS:
        check(case)
    for technique in TECHNIQUES:
        technique.check(case)


def check_given(written: Plan, recipe: Recipe, facts: ModelFacts) -> None:
    """Raise where one of the settings that a user gave (`origins`) can stand in no plan for this model, whatever a
    search chooses beside it.

    Raises:
        PlanError: a number of stages or tensor ranks, a recomputation or a shared sequence that the model has not got.
    """
    plan = replace(Plan(), origins=written.origins)
    judged = {key for technique in TECHNIQUES for key in technique.judged_alone}
    for setting in plan_settings():
        if setting.key in judged and setting.key in written.origins:
            plan = setting.set(plan, setting.of(written))
    case = Case(plan, recipe, facts, None)
    for technique in TECHNIQUES:
        technique.check_model(case)


def runnability(plan: Plan) -> list[str]:
    """Return why a plan can only be predicted, one sentence per setting; an empty list when it can be run."""
    return [reason for technique in TECHNIQUES for reason in technique.unrunnable(plan)]


def check_runnable(plan: Plan) -> None:
    """Raise unless the engine can run the plan today.

    Raises:
        PlanError: with every setting that can only be predicted yet.
    """
    reasons = runnability(plan)
    if reasons:
        raise PlanError("\n".join(reasons))


def mesh_sizes(plan: Plan) -> str:
    """Return the axes larger than one as a product: `data 2 × tensor 2 × pipeline 2`.  Ranks that share experts out are
    no further ones: `data 4 (expert 2)`."""
    mesh = plan.mesh
    axes: list[tuple[str, int]] = [("data", mesh.data)]
    if mesh.replicate > 1 and mesh.shard > 1:
        axes = [("replicate", mesh.replicate), ("shard", mesh.shard)]
    axes += [("tensor", mesh.tensor), ("pipeline", mesh.pipeline), ("context", mesh.context)]
    product = " × ".join(f"{name} {size}" for name, size in axes if size > 1) or "data 1"
    return f"{product} (expert {mesh.expert})" if mesh.expert > 1 else product


def _check_world(case: Case) -> None:
    world, mesh = case.world_size, case.plan.mesh
    if world is None or mesh.world_size == world:
        return
    data_axis = "shard" if mesh.shard > 1 else "replicate"
    others = {axis: mesh.world_size // getattr(mesh, axis) for axis in (data_axis, "tensor", "pipeline")}
    fixes = [f"{axis} = {world // rest}" for axis, rest in others.items() if world % rest == 0]
    fixes.append(f"{mesh.world_size} processes")
    problem = f"makes {mesh.world_size} processes ({mesh_sizes(case.plan)}), but there are {world}."
    raise case.refuse(("mesh",), f"{problem}\nUse {', or '.join(fixes)}.", show=False)


def _check_devices(case: Case) -> None:
    """The recipe's bounds on the devices of a run."""
    run, world = case.recipe.run, case.plan.mesh.world_size
    least, most = run.min_devices, run.max_devices
    if world < least:
        bound = f"run.min_devices = {least}"
    elif most is not None and world > most:
        bound = f"run.max_devices = {most}"
    else:
        return
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    problem = f"makes {ranks} ({mesh_sizes(case.plan)}), and the recipe has {bound}.\nUse a plan for that many."
    raise case.refuse(("mesh",), problem, show=False)


def _check_numerics(case: Case) -> None:
    plan, permit = case.plan, case.recipe.permit
    if plan.compute.precision not in permit.precision:
        allowed = format_value(permit.precision)
        more = format_value([*permit.precision, plan.compute.precision])
        problem = f"is not permitted by the recipe, whose permit.precision = {allowed}."
        raise case.refuse(
            ("compute", "precision"), f'{problem}\nUse "{permit.precision[0]}", or permit.precision = {more}.'
        )


_CHECKS: tuple[Callable[[Case], None], ...] = (
    _check_world,
    _check_devices,
    _check_numerics,
)
"""The checks that belong to no technique."""
