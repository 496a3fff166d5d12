"""Where the time of a step went, on every rank, from what ranks recorded.

Columns of a step's matrix (`weft.watch.store`), all in seconds but memory:

- `start`: begin of the step after that of the rank that began first; `wall`: the whole step.
- States, which sum to `wall`: `compute`, `communication` (exposed), `bubble`, `input`, `checkpoint`, `idle`.
  `descheduled` is the part of `compute` in which the rank's thread was ready to run and had no processor.
- `phase:<name>`: time of each phase, waits inside included; they sum to `wall`.  `waits:<name>`: exposed waits for
  other ranks inside of it, so that phase − waits is the rank's own time.
- `exposed:<axis>`, `total:<axis>`: time inside waits, and from launch to end, of the collectives of a mesh axis.
- `bubble:fill`, `bubble:drain`, `bubble:imbalance`: what `bubble` consists of.
- `memory`: bytes that the rank holds at the step's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.watch.store import Matrix, StepWindow

STATES = ("compute", "communication", "bubble", "input", "checkpoint", "idle")
"""Columns that sum to `wall`."""
ACTIONS = ("forward", "backward", "weights")
"""What microbatches do inside of `forward_backward`; `weights` are passes of schedules that split the backward."""
PHASES = ("data_wait", *ACTIONS, "forward_backward", "reduce_wait", "optimizer")
"""Phases of every step, in their order; further ones (of techniques, `checkpoint`, `evaluation`) come behind, and
`other` last.  `forward_backward` is what its microbatches' forwards and backwards leave of it."""
PHASE_TITLES: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "weights": "gradients of weights",
    "forward_backward": "between forwards and backwards",
    "reduce_wait": "reducing gradients",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "outside of phases",
}
"""Names of phases, as a reader is shown them."""

_DATA_GROUPS = ("replicate", "shard", "data", "expert_data", "expert_shard", "context_data", "context_shard")
TERM_OF_AXIS: Mapping[str, str] = {
    **dict.fromkeys(_DATA_GROUPS, "data"),
    **{name: name for name in ("expert", "tensor", "context", "pipeline")},
}
"""Term of the prediction that an axis's exposed communication belongs to."""


def phase_title(name: str) -> str:
    """Return what a reader is shown of a phase; a technique's phase has its own name."""
    return PHASE_TITLES.get(name, name or "between phases")


_MEANINGS: Mapping[str, str] = {
    "start": "begin of the step after that of the rank that began first",
    "wall": "the whole step",
    "compute": "computing",
    "communication": "waits for other ranks that computing does not hide, without the pipeline's bubble",
    "bubble": "waits of a pipeline's stage for other stages",
    "input": "waiting for data",
    "checkpoint": "saving and evaluating",
    "idle": "outside of phases",
    "descheduled": "part of computing in which the thread was ready to run and had no processor",
    "others": "processor time of other programs on the rank's host during the step",
    "memory": "memory that the rank holds at the step's end",
    "bubble:fill": "bubble before the first microbatch",
    "bubble:drain": "bubble behind the last microbatch",
    "bubble:imbalance": "bubble between microbatches",
}
_MEANINGS_OF_KINDS: Mapping[str, str] = {
    "phase": "time in phase {}, waits inside of it included",
    "waits": "waits for other ranks in phase {}",
    "exposed": "time inside of waits for collectives along axis {}",
    "total": "time from launch to end of collectives along axis {}",
}


def column_meaning(column: str) -> tuple[str, str]:
    """Return the unit of a column, `seconds` or `bytes`, and what it says; an unknown one has its name alone."""
    kind, _, name = column.partition(":")
    known = _MEANINGS.get(column) or _MEANINGS_OF_KINDS.get(kind, column).format(name)
    return "bytes" if column == "memory" else "seconds", known


class StepFrontier(NamedTuple):
    """The phases that set the pace of the job, step by step.

    Let C(r, p) be the time from the step's begin to the end of phase p on rank r.  The frontier is F(p) = max over r of
    C(r, p), and phase p advances it by F(p) − F(p−1).  These sum to the longest rank's step exactly, whatever ranks
    wait for in between, because a wait moves its own C alone (StageFrontier, arXiv 2606.06751, section 3).
    """

    phases: tuple[str, ...]
    seconds: NDArray[np.float32]
    """Shape (steps, phases)."""
    ranks: NDArray[np.int64]
    """Shape (steps, phases): rank whose own time in the phase, without waits for others, was longest."""


def phase_names(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the phases of a window's columns, in the order in which a step goes through them."""
    found = [column.removeprefix("phase:") for column in columns if column.startswith("phase:")]
    ordered = [name for name in PHASES if name in found]
    return (*ordered, *(name for name in found if name not in PHASES and name != "other"), "other")


def axis_names(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes of a window's columns."""
    return tuple(column.removeprefix("exposed:") for column in columns if column.startswith("exposed:"))


def frontier(window: StepWindow) -> StepFrontier:
    """Return what each phase of a window adds to the step of the job."""
    phases = phase_names(window.columns)
    times = np.stack([window.column(f"phase:{name}") for name in phases], axis=2)  # steps × ranks × phases
    reached = np.nanmax(np.cumsum(np.nan_to_num(times), axis=2), axis=1, initial=0.0)  # steps × phases
    seconds = np.diff(reached, axis=1, prepend=0.0)
    own = own_times(window, phases)
    ranks = np.argmax(np.nan_to_num(own, nan=-1.0), axis=1) if own.shape[1] else np.zeros(seconds.shape, np.int64)
    return StepFrontier(phases, seconds.astype(np.float32), ranks)


def own_times(window: StepWindow, phases: Sequence[str]) -> Matrix:
    """Return each rank's time in each phase without waits for other ranks: shape (steps, ranks, phases)."""
    times = [window.column(f"phase:{name}") - window.column(f"waits:{name}") for name in phases]
    return np.maximum(np.stack(times, axis=2), 0.0)


STEP = np.dtype([("step", "<i8"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("memory_bytes", "<i8")])
"""One step of one rank, on the host's monotonic clock."""


class RankRecords(NamedTuple):
    """What one rank recorded in consecutive steps."""

    steps: NDArray[Any]
    """Records with the fields of `STEP`, in their order."""
    spans: NDArray[Any]
    """Records with `name`, `start_ns`, `duration_ns`, `own_ns` and `cpu_ns`, of these steps and perhaps others."""
    collectives: NDArray[Any]
    """Records of `weft.watch.store.COLLECTIVE`, of these steps and perhaps others."""
    names: Sequence[str]
    """Names that the records' indexes point into."""


def account(
    records: RankRecords, axes: Sequence[str], *, has_pipeline: bool, delay_share: float | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return the columns of a rank's steps but `start`, each of shape (steps,).

    `delay_share` is the share of these steps' time in which the rank's thread was ready to run and had no processor;
    None where the system does not say: then it is what the thread was not on one, without waits for ranks.
    """
    steps, names = records.steps, records.names
    starts, ends = steps["start_ns"], steps["end_ns"]
    spans, span_steps = _in_steps(records.spans, records.spans["start_ns"], starts, ends)
    waits, wait_steps = _in_steps(records.collectives, records.collectives["waited_ns"], starts, ends)
    used = np.unique(spans["name"]).tolist()
    wall = (ends - starts) / 1e9
    own = _sums(len(steps), len(names), span_steps, spans["name"], spans["own_ns"])
    actions = [index for index in used if names[index] in ACTIONS]
    if "forward_backward" in names:  # what its actions leave of it
        around = list(names).index("forward_backward")
        own[:, around] = np.maximum(own[:, around] - own[:, actions].sum(axis=1), 0.0)
    inside = _innermost(spans, np.isin(spans["name"], actions), waits["waited_ns"])
    holders = np.where(inside >= 0, spans["name"][inside] if len(spans) else 0, len(names))
    waited = _sums(len(steps), len(names) + 1, wait_steps, holders, waits["exposed_ns"])
    values: dict[str, NDArray[np.float64]] = {"wall": wall}
    for index in used:
        values[f"phase:{names[index]}"] = own[:, index]
        # Waits in two threads may overlap: the phase has no more time than it has.
        values[f"waits:{names[index]}"] = np.minimum(waited[:, index], own[:, index])
    values["phase:other"] = np.maximum(wall - own.sum(axis=1), 0.0)
    values["waits:other"] = np.minimum(waited[:, -1], values["phase:other"])
    _axis_columns(values, records, axes, waits, wait_steps)
    if has_pipeline:
        computing = np.isin(spans["name"], actions)
        _bubble(values, spans[computing], span_steps[computing], waits, wait_steps, names)
    _states(values)
    if delay_share is None:
        _descheduled(values, spans, span_steps, waits, wait_steps, inside)
    else:
        values["descheduled"] = np.minimum(delay_share * wall, values["compute"])
    values["memory"] = steps["memory_bytes"].astype(np.float64)
    return values


def _in_steps(
    records: NDArray[Any], moments: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the records whose moment lies in a step, and the index of that step."""
    at = np.searchsorted(starts, moments, side="right") - 1
    keep = (at >= 0) & (moments <= ends[at]) if len(ends) else np.zeros(len(records), dtype=bool)
    return records[keep], at[keep]


def _sums(
    num_steps: int, num_kinds: int, steps: NDArray[np.int64], kinds: NDArray[Any], nanoseconds: NDArray[Any]
) -> NDArray[np.float64]:
    """Return seconds by step and kind."""
    flat = np.bincount(steps * num_kinds + kinds, weights=nanoseconds, minlength=num_steps * num_kinds)
    return flat.reshape(num_steps, num_kinds) / 1e9


def _innermost(spans: NDArray[Any], is_action: NDArray[np.bool_], moments: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of the innermost span that is open at each moment; −1: none.

    Actions hold no other spans of a step, so they are looked at first.  The others nest a few deep.
    """
    best = np.full(len(moments), -1, dtype=np.int64)
    for kind, most in ((is_action, 1), (~is_action, 8)):
        order = np.flatnonzero(kind)
        order = order[np.argsort(spans["start_ns"][order], kind="stable")]
        starts = spans["start_ns"][order]
        ends = starts + spans["duration_ns"][order]
        at = np.searchsorted(starts, moments, side="right") - 1
        # The span that began last before a moment holds it, or is over: then one that began before may still be open.
        for _ in range(most):
            holds = (best < 0) & (at >= 0)
            holds[holds] = moments[holds] <= ends[at[holds]]
            best[holds] = order[at[holds]]
            at -= 1
    return best


def _axis_columns(
    values: dict[str, NDArray[np.float64]],
    records: RankRecords,
    axes: Sequence[str],
    waits: NDArray[Any],
    wait_steps: NDArray[np.int64],
) -> None:
    """Add the time in waits and from launch to end, by mesh axis."""
    steps, names = records.steps, list(records.names)
    launched, launch_steps = _in_steps(
        records.collectives, records.collectives["launched_ns"], steps["start_ns"], steps["end_ns"]
    )
    for axis in axes:
        number = names.index(axis) if axis in names else -1
        mine = waits["axis"] == number
        exposed = np.bincount(wait_steps[mine], weights=waits["exposed_ns"][mine], minlength=len(steps))
        ended = (launched["axis"] == number) & (launched["done_ns"] > 0)
        took = (launched["done_ns"] - launched["launched_ns"])[ended]
        total = np.bincount(launch_steps[ended], weights=took, minlength=len(steps))
        values[f"exposed:{axis}"], values[f"total:{axis}"] = exposed / 1e9, total / 1e9


def _bubble(
    values: dict[str, NDArray[np.float64]],
    computing: NDArray[Any],
    computing_steps: NDArray[np.int64],
    waits: NDArray[Any],
    wait_steps: NDArray[np.int64],
    names: Sequence[str],
) -> None:
    """Split the time in which a pipeline's rank had nothing to compute: before its first microbatch, after its last
    one, and in between, where stages are not equally long."""
    num_steps = len(values["wall"])
    first = np.full(num_steps, np.iinfo(np.int64).max)
    last = np.zeros(num_steps, dtype=np.int64)
    np.minimum.at(first, computing_steps, computing["start_ns"])
    np.maximum.at(last, computing_steps, computing["start_ns"] + computing["duration_ns"])
    pipeline = waits["axis"] == (list(names).index("pipeline") if "pipeline" in names else -1)
    # The ranks of all stages meet in the agreement behind their last backwards: who comes early waits there.
    world = waits["axis"] == (list(names).index("world") if "world" in names else -1)
    before = pipeline & (waits["waited_ns"] < first[wait_steps])
    after = (pipeline | world) & (waits["waited_ns"] >= last[wait_steps])
    for name, mine in (("fill", before), ("drain", after), ("imbalance", pipeline & ~before & ~after)):
        exposed = np.bincount(wait_steps[mine], weights=waits["exposed_ns"][mine], minlength=num_steps)
        values[f"bubble:{name}"] = exposed / 1e9


def _states(values: dict[str, NDArray[np.float64]]) -> None:
    """Add the states, which sum to the step."""
    nothing = np.zeros(len(values["wall"]))

    def own(phase: str) -> NDArray[np.float64]:
        return values.get(f"phase:{phase}", nothing) - values.get(f"waits:{phase}", nothing)

    waits = sum((column for name, column in values.items() if name.startswith("waits:")), nothing)
    bubble = sum((column for name, column in values.items() if name.startswith("bubble:")), nothing)
    bubble = np.minimum(bubble, waits)
    apart = {"input": own("data_wait"), "checkpoint": own("checkpoint") + own("evaluation"), "idle": own("other")}
    values["compute"] = np.maximum(values["wall"] - waits - sum(apart.values(), nothing), 0.0)
    values["communication"], values["bubble"] = waits - bubble, bubble
    values |= apart


def _descheduled(
    values: dict[str, NDArray[np.float64]],
    spans: NDArray[Any],
    span_steps: NDArray[np.int64],
    waits: NDArray[Any],
    wait_steps: NDArray[np.int64],
    inside: NDArray[np.int64],
) -> None:
    """Add the seconds in which the thread that computes was neither on a processor nor waited for ranks."""
    num_steps = len(values["wall"])
    asked = spans["cpu_ns"] >= 0
    off = np.bincount(span_steps[asked], weights=(spans["duration_ns"] - spans["cpu_ns"])[asked], minlength=num_steps)
    held = inside >= 0  # waits outside of spans are none of computing
    waited = np.bincount(wait_steps[held], weights=waits["exposed_ns"][held], minlength=num_steps)
    values["descheduled"] = np.minimum(np.maximum(off - waited, 0.0) / 1e9, values["compute"])
