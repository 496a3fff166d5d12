"""What several pages say in the same words: ranks by name, times of a window, marks of what happened."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import AXES, BATCH_AXES, EXPERT_LENDERS, Axis, groups_over, parse_plan
from weft.errors import PlanError
from weft.formatting import format_seconds
from weft.watch.run_record import RunRecord
from weft.watch.store import GenerationFacts, StepWindow
from weft.watch.views._blocks import Block, block, note

STATE_TITLES: Mapping[str, str] = {
    "compute": "computing",
    "communication": "communication",
    "bubble": "pipeline bubble",
    "input": "waiting for data",
    "checkpoint": "checkpoint, evaluation",
    "idle": "outside of phases",
}
EVENT_TITLES: Mapping[str, str] = {
    "checkpoint": "saved",
    "evaluation": "evaluated",
    "warning": "warning",
    "failure": "failure",
    "generation": "new generation",
    "gap": "not recorded",
}
_AXES_OF_GROUP: Mapping[str, Collection[Axis]] = {"data": BATCH_AXES, "shard": EXPERT_LENDERS}
"""Groups over several axes (`weft.comm.mesh`); `expert_data` and others leave some of their ranks out."""
RECENT_STEPS = 60
"""Steps that sentences and bars are over."""


def recent(window: StepWindow, number: int = RECENT_STEPS) -> StepWindow:
    """Return the newest steps of a window, without the first one of the run, which warms up."""
    if len(window.steps) > 1 and window.steps[0] == 1:
        window = part(window, slice(1, None))
    return part(window, slice(-number, None))


def part(window: StepWindow, steps: slice) -> StepWindow:
    """Return some steps of a window."""
    return window._replace(
        steps=window.steps[steps],
        num_steps=window.num_steps[steps],
        unix_times=window.unix_times[steps],
        values=window.values[steps],
    )


def mean(values: NDArray[Any], axis: int | None = None) -> NDArray[np.float64]:
    """Return the mean of what is known; nan where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(values, axis=axis, dtype=np.float64))


def median(values: NDArray[Any], axis: int | None = None) -> NDArray[np.float64]:
    """Return the median of what is known; nan where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis), dtype=np.float64)


def host_of(facts: GenerationFacts, rank: int) -> str:
    """Return the host of a rank; empty where unknown."""
    return str(facts.ranks[rank].get("host", "")) if rank < len(facts.ranks) else ""


def coordinates_of(facts: GenerationFacts, rank: int) -> dict[str, int]:
    """Return a rank's place on every axis above 1."""
    if rank >= len(facts.ranks):
        return {}
    known: Mapping[str, int] = facts.ranks[rank].get("coordinates", {})
    return {axis: int(known[axis]) for axis in facts.axes if axis in known}


def place_of(facts: GenerationFacts, rank: int) -> str:
    """Return a rank's coordinates in words: `pipeline 1, data 0`."""
    return ", ".join(f"{axis} {index}" for axis, index in coordinates_of(facts, rank).items())


def groups_of(facts: GenerationFacts, names: Iterable[str], num_ranks: int) -> dict[str, list[list[int]]]:
    """Return the groups of ranks that communicate under each of the names that collectives are recorded by.

    They follow from the plan.  One that cannot be read, or has no such group, gives one group of all ranks.
    """
    mesh = None
    with suppress(PlanError):
        mesh = parse_plan(facts.plan).mesh
    found: dict[str, list[list[int]]] = {}
    for name in names:
        first, _, rest = name.partition("_")
        axes = _AXES_OF_GROUP.get(rest or name) or ((name,) if name in AXES else None)
        if mesh is None or mesh.world_size != num_ranks:
            found[name] = _by_coordinates(facts, name, num_ranks)
        elif axes is None:
            found[name] = [list(range(num_ranks))]
        else:
            holding = {"expert": ("expert",), "context": ("context",)}.get(first, ()) if rest else ()
            found[name] = [list(group) for group in groups_over(mesh, axes, holding)]  # type: ignore[arg-type]
    return found


def _by_coordinates(facts: GenerationFacts, axis: str, num_ranks: int) -> list[list[int]]:
    if axis not in facts.axes:
        return [list(range(num_ranks))]
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(num_ranks):
        others = tuple((name, at) for name, at in coordinates_of(facts, rank).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def span_of_steps(window: StepWindow) -> str:
    """Return `steps 141 to 200`."""
    first, last = int(window.steps[0]), int(window.steps[-1])
    return f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"


def not_recorded(record: RunRecord) -> Block:
    """Return why a page about ranks is empty."""
    if record.problem:
        return note("Telemetry cannot be read", record.problem)
    if record.steps:
        says = (
            "This run has no telemetry, so that nothing is known of single ranks: the pages overview, events and"
            " training show what rank 0 reported. Runs are recorded unless run.telemetry = false."
        )
    else:
        says = "No step has ended yet." + (f" The run is {record.state}." if record.state != "unknown" else "")
    return note("Nothing is recorded", says)


def hang_block(record: RunRecord) -> Block | None:
    """Return the banner of a run that stands still; None for one that goes on."""
    stall = record.stall
    if stall is None:
        return None
    says = f"A step usually takes {format_seconds(record.usual_seconds)}. {stall.evidence[-1].capitalize()}."
    return block("banner", stall.title.removesuffix("."), says, ranks=list(stall.ranks), page="hang")


def few(ranks: Sequence[int], most: int = 8) -> str:
    """Return `3, 4 and 12 more`."""
    named = ", ".join(str(rank) for rank in ranks[:most])
    return named + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def step_marks(record: RunRecord) -> list[dict[str, Any]]:
    """Return marks for charts over steps: failures and new generations."""
    marks: list[dict[str, Any]] = []
    for event in record.events[-200:]:
        if event.get("kind") == "generation":
            marks.append({"x": event.get("restored_step") or 0, "label": f"generation {event.get('number')}"})
    return marks
