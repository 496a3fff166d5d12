"""Which pipeline schedules there are, and which rank has which stage.  Their orders stand in `orders.py`.  No torch."""

from __future__ import annotations

from typing import Literal

from weft.errors import PlanError

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
PricedSchedule = Schedule | Literal["zero_bubble_2p"]
"""A schedule, or one of other systems which can be priced but not run here: `zero_bubble_2p` is ZB-H2, which fills
the pipeline with twice the microbatches and lets every rank begin the next step as soon as it has ended this one."""

SPLIT_BACKWARD: frozenset[PricedSchedule] = frozenset({"interleaved_zero_bubble", "zero_bubble_2p", "zbv", "dualpipev"})
"""Schedules whose backward comes in two passes: gradients of the inputs first, of the weights later."""

_CHUNKS: dict[PricedSchedule, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, None),
    "interleaved_zero_bubble": (1, None),
    "zero_bubble_2p": (1, 1),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}


def chunk_limits(schedule: PricedSchedule) -> tuple[int, int | None]:
    """Return the least and the most chunks per rank of a schedule; None is no limit."""
    return _CHUNKS[schedule]


def check_schedule(schedule: PricedSchedule, pipeline: int, chunks: int) -> None:
    """Raise unless the schedule exists with so many chunks per rank.

    Raises:
        PlanError: with the number of chunks to take.
    """
    least, most = _CHUNKS[schedule]
    if pipeline < 2:
        raise PlanError(
            f'plan.pipeline_parallel.schedule = "{schedule}" needs plan.mesh.pipeline of at least 2, not {pipeline}.'
        )
    if chunks < least or (most is not None and chunks > most):
        allowed = f"{least}" if most == least else f"{least} or more"
        raise PlanError(
            f'plan.pipeline_parallel.chunks_per_rank = {chunks} does not fit schedule = "{schedule}": it has {allowed}.'
            f" Set chunks_per_rank = {least}."
        )


def stage_ranks(schedule: PricedSchedule, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Pipeline rank of each stage: round and round, or down and up again for the V-shaped schedules."""
    stages = range(pipeline * chunks)
    if schedule in ("zbv", "dualpipev"):
        return tuple(min(stage, 2 * pipeline - 1 - stage) for stage in stages)
    return tuple(stage % pipeline for stage in stages)
