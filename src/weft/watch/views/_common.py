"""What several pages say in the same words: ranks by name, times of a window, marks of what happened."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.events import format_duration
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


def groups_of(facts: GenerationFacts, axis: str, num_ranks: int) -> list[list[int]]:
    """Return the groups of ranks that communicate along an axis; all ranks in one for `world`."""
    if axis == "world" or axis not in facts.axes:
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
    stalled = record.stalled_seconds
    if not stalled:
        return None
    absent, waiting = absent_ranks(record)
    if absent and waiting:
        open_ = record.live[waiting[0]]["open"]
        who = f"Rank {absent[0]}" if len(absent) == 1 else f"Ranks {few(absent)}"
        verb = "has" if len(absent) == 1 else "have"
        says = (
            f"{who} {verb} not joined the {open_.get('operation', 'collective')} along the"
            f" {open_.get('axis', '?')} axis that {len(waiting)} other{'s' if len(waiting) > 1 else ''} wait"
            f"{'s' if len(waiting) == 1 else ''} in."
        )
    else:
        says = "No rank's open collective says which one is missing."
    return block(
        "banner",
        f"No step for {format_duration(stalled)}; one usually takes {format_seconds(record.usual_seconds)}",
        says,
        level="serious",
        page="hang",
    )


def absent_ranks(record: RunRecord) -> tuple[list[int], list[int]]:
    """Return the ranks that others wait for, and those that wait in a collective, by what they said last."""
    waiting = [rank for rank, state in record.live.items() if state.get("open")]
    if not waiting:
        return [], []
    by_number: dict[tuple[str, int], list[int]] = {}
    for rank in waiting:
        open_ = record.live[rank]["open"]
        by_number.setdefault((str(open_.get("axis")), int(open_.get("number") or 0)), []).append(rank)
    (axis, number), members = max(by_number.items(), key=lambda item: len(item[1]))
    everyone = set(range(record.num_ranks))
    peers = {rank for group in groups_of(record.facts, axis, record.num_ranks) if set(group) & set(members)
             for rank in group} or everyone  # fmt: skip
    absent = [
        rank
        for rank in sorted(peers - set(members))
        if int((record.live.get(rank, {}).get("completed") or {}).get(axis, 0)) < number
    ]
    return absent, members


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
