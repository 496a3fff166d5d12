"""Dry runs of the ranks of a plan that differ: one of every few stages, and the neighbours that share groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.config.plan import Axis, Plan, axis_coordinates
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.verify.dry_run._agree import disagreements, peers_to_ask, rank_at
from weft.verify.dry_run._dry_run import ActivationShape, RankReport, dry_run_rank, find_draws


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReport:
    """The dry runs of several ranks."""

    asked: tuple[RankReport, ...]
    """The groups that were asked for, by rank."""
    compared: tuple[int, ...]
    """Neighbours of the first of them whose collectives were compared with its own."""
    problems: tuple[str, ...]
    """Places where two ranks of a group would start different operations, one sentence each."""


def representative_ranks(plan: Plan) -> tuple[int, ...]:
    """Return a rank of the first, second and last stage: data and tensor ranks of a stage are alike."""
    # A middle stage has neither embedding nor head; one stands for all of them.
    stages = sorted({0, min(1, plan.mesh.pipeline - 1), plan.mesh.pipeline - 1})
    origin = axis_coordinates(plan.mesh, 0)
    return tuple(rank_at(plan.mesh, {**origin, "pipeline": stage}) for stage in stages)


def dry_run_world(
    recipe: Recipe,
    plan: Plan,
    build: Callable[[], Blueprint],
    ranks: Sequence[int] = (),
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> WorldReport:
    """Run a step of `ranks` (by default `representative_ranks`) and compare the first of them with its neighbours.

    Activations between stages are taken to have the shape that leaves the first stage.  Not collective.

    Raises:
        PlanError: what building a rank refuses.
    """
    asked = tuple(ranks) or representative_ranks(plan)
    known, draws = dict[int, RankReport](), find_draws(plan, build)

    def activation_of(rank: int) -> ActivationShape | None:
        """Return the activation that a rank of the first stage sends; tensor and context ranks may differ in length."""
        place = axis_coordinates(plan.mesh, rank)
        if plan.mesh.pipeline == 1 or place["pipeline"] == 0:
            return None
        # The first stage's rank at the same place of the axes that shape an activation; other axes do not change it.
        own: dict[Axis, int] = {"tensor": place["tensor"], "context": place["context"]}
        like: dict[Axis, int] = {**axis_coordinates(plan.mesh, asked[0]), **own, "pipeline": 0}
        return of(rank_at(plan.mesh, like)).activation

    def of(rank: int) -> RankReport:
        if rank not in known:
            activation = activation_of(rank)
            progress(f"rank {rank:,} of {plan.mesh.world_size:,}")
            known[rank] = dry_run_rank(recipe, plan, build, rank, activation=activation, draws=draws)
        return known[rank]

    reports = tuple(of(rank) for rank in asked)
    peers = peers_to_ask(plan.mesh, asked[0])
    problems = [problem for peer in peers for problem in disagreements(reports[0], of(peer))]
    return WorldReport(asked=reports, compared=peers, problems=tuple(dict.fromkeys(problems)))
