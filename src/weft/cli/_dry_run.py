"""`weft plan --dry-run`: what single ranks of the plan would hold and send, without devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from weft.errors import PlanError
from weft.formatting import format_bytes, format_memory

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.config.recipe import Recipe
    from weft.verify.dry_run import RankReport, WorldReport


def dry_run(recipe: Recipe, plan: Plan, ranks: Sequence[int] = ()) -> None:
    """Print dry runs of `ranks` of the plan, by default of one rank of the first, the second and the last stage.

    Raises:
        PlanError: the plan cannot be run, a rank is outside its world, or ranks of a group would start different
            collectives (status 1).
    """
    from weft.analysis.blueprint import build_blueprint
    from weft.techniques.check import check_runnable
    from weft.verify.dry_run import dry_run_world

    check_runnable(plan)
    world = plan.mesh.world_size
    for rank in ranks:
        if not 0 <= rank < world:
            raise PlanError(f"--rank {rank} is outside the plan's world of {world:,}. Use 0 to {world - 1:,}.")
    report = dry_run_world(recipe, plan, lambda: build_blueprint(recipe, plan), ranks, progress=_tell)
    print("\n".join(_lines(report, world)))
    if report.problems:
        listed = "\n".join(report.problems)
        raise PlanError(
            f"Ranks of one group would not start the same operations; the job would hang:\n{listed}", status=1
        )


def _tell(text: str) -> None:
    print(f"dry run   {text} …", file=sys.stderr)


def _lines(report: WorldReport, world: int) -> Iterator[str]:
    for rank in report.asked:
        yield from _rank_lines(rank, world)
    for note in dict.fromkeys(note for rank in report.asked for note in rank.notes):
        yield f"note      {note}"
    if report.compared and not report.problems:
        peers = ", ".join(f"{peer:,}" for peer in report.compared)
        yield f"agree     rank {report.asked[0].rank:,} and {peers} start the same collectives in the groups they share"
    yield from _predicted_lines(report)


def _predicted_lines(report: WorldReport) -> Iterator[str]:
    """Whether ranks send what their programs, predicted without running anything, say."""
    left_out = dict.fromkeys(sentence for rank in report.asked for sentence in rank.unpredicted)
    yield from (f"predicted not: {sentence}" for sentence in left_out)
    unlike = [(rank.rank, line) for rank in report.asked for line in rank.unlike_predicted]
    yield from (f"predicted rank {rank:,}: {line}" for rank, line in unlike)
    if not left_out and not unlike and any(rank.issued for rank in report.asked):
        yield "predicted each of these ranks sends exactly what was predicted of it: operation, axis, bytes, count"


def _rank_lines(report: RankReport, world: int) -> Iterator[str]:
    place = ", ".join(f"{axis} {at}" for axis, at in report.coordinates.items() if at) or "first on every axis"
    state = report.state
    yield f"rank      {report.rank:,} of {world:,} ({place})"
    listed = " · ".join(f"{kind} {format_memory(size)}" for kind, size in asdict(state).items() if size)
    yield f"          holds {format_memory(state.total)} of state: {listed}"
    for (axis, op), (count, size) in sorted(report.step_traffic.items()):
        mean_size = format_bytes(size / count)
        yield f"          {axis:<9} {op:<15} {count:>9,.0f} × {mean_size:>9} = {format_bytes(size):>9} per step"
