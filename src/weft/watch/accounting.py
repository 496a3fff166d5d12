"""Where the time of a step went, on every rank, from what ranks recorded.

Columns of a step's matrix (`weft.watch.store`), all in seconds but memory:

- `start`: begin of the step after that of the rank that began first; `wall`: the whole step.
- States, which sum to `wall`: `compute`, `communication` (exposed), `bubble`, `input`, `checkpoint`, `idle`.
  `descheduled` is the part of `compute` in which the rank's thread was on no processor.
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
PHASES = ("data_wait", "forward", "backward", "forward_backward", "reduce_wait", "optimizer")
"""Phases of every step, in their order; further ones (of techniques, `checkpoint`, `evaluation`) come behind, and
`other` last.  `forward_backward` is what its microbatches' forwards and backwards leave of it."""
PHASE_TITLES: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "between forwards and backwards",
    "reduce_wait": "reducing gradients",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "outside of phases",
}
"""Names of phases, as a reader is shown them."""


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


class RankStep(NamedTuple):
    """One step of one rank, as its ring has it.  Times in nanoseconds of the host's monotonic clock."""

    step: int
    start_ns: int
    end_ns: int
    memory_bytes: int
    spans: NDArray[Any]
    """Records with `name`, `start_ns`, `duration_ns`, `own_ns`, `cpu_ns`, in the order of their ends."""
    collectives: NDArray[Any]
    """Records of `weft.watch.store.COLLECTIVE` whose wait ended, or that were launched, in this step."""


def account(step: RankStep, span_names: Sequence[str], axes: Sequence[str], *, has_pipeline: bool) -> dict[str, float]:
    """Return the values of a rank's step by column, but `start`."""
    wall = max(step.end_ns - step.start_ns, 0)
    spans, collectives = step.spans, step.collectives
    own = np.zeros(len(span_names), dtype=np.int64)
    np.add.at(own, spans["name"], spans["own_ns"])
    inside = _innermost(spans, collectives["waited_ns"])
    waits = np.zeros(len(span_names) + 1, dtype=np.int64)  # the last one: in no span
    np.add.at(waits, np.where(inside >= 0, spans["name"][inside] if len(spans) else 0, len(span_names)),
              collectives["exposed_ns"])  # fmt: skip
    values: dict[str, float] = {"wall": wall / 1e9}
    for index, name in enumerate(span_names):
        values[f"phase:{name}"] = own[index] / 1e9
        # Waits that overlap in two threads may sum to more than the phase, which has one.
        values[f"waits:{name}"] = min(waits[index], own[index]) / 1e9
    rest = max(wall - int(own.sum()), 0)
    values["phase:other"], values["waits:other"] = rest / 1e9, min(int(waits[-1]), rest) / 1e9
    for index, axis in enumerate(axes):
        mine = collectives[collectives["axis"] == index]
        values[f"exposed:{axis}"] = float(mine["exposed_ns"].sum()) / 1e9
        ended = mine[mine["done_ns"] > 0]
        values[f"total:{axis}"] = float((ended["done_ns"] - ended["launched_ns"]).sum()) / 1e9
    values |= _bubble(step, span_names, axes) if has_pipeline else {}
    return {**values, **_states(values), "descheduled": _descheduled(step, span_names), "memory": step.memory_bytes}


def _innermost(spans: NDArray[Any], moments: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of the innermost span that is open at each moment; −1: none."""
    if not len(spans):
        return np.full(len(moments), -1, dtype=np.int64)
    order = np.argsort(spans["start_ns"], kind="stable")
    starts, ends = spans["start_ns"][order], (spans["start_ns"] + spans["duration_ns"])[order]
    at = np.searchsorted(starts, moments, side="right") - 1
    # The span that began last before a moment holds it, or is over: then one that began earlier may still be open.
    # Spans nest a few deep, so that walking back a few steps past siblings finds it, or there is none.
    best = np.full(len(moments), -1, dtype=np.int64)
    for index, place in enumerate(at):
        while place >= 0:
            if moments[index] <= ends[place]:
                best[index] = order[place]
                break
            place -= 1
    return best


def _bubble(step: RankStep, span_names: Sequence[str], axes: Sequence[str]) -> dict[str, float]:
    """Split the time in which a pipeline's rank had nothing to compute: before its first microbatch, after its last
    one, and in between, where stages are not equally long."""
    actions = [index for index, name in enumerate(span_names) if name in ("forward", "backward")]
    computing = step.spans[np.isin(step.spans["name"], actions)]
    if not len(computing):
        return {}
    first, last = computing["start_ns"].min(), (computing["start_ns"] + computing["duration_ns"]).max()
    pipeline = axes.index("pipeline") if "pipeline" in axes else -1
    world = axes.index("world") if "world" in axes else -1
    waits = step.collectives[np.isin(step.collectives["axis"], [pipeline, world])]
    own, agreement = waits[waits["axis"] == pipeline], waits[waits["axis"] == world]
    before = own["waited_ns"] < first
    after = own["waited_ns"] >= last
    # The ranks of all stages meet in the agreement behind their last backwards: who comes early waits there.
    drain = own["exposed_ns"][after].sum() + agreement["exposed_ns"][agreement["waited_ns"] >= last].sum()
    return {
        "bubble:fill": float(own["exposed_ns"][before].sum()) / 1e9,
        "bubble:drain": float(drain) / 1e9,
        "bubble:imbalance": float(own["exposed_ns"][~before & ~after].sum()) / 1e9,
    }


def _states(values: Mapping[str, float]) -> dict[str, float]:
    wall = values["wall"]
    bubble = sum(value for name, value in values.items() if name.startswith("bubble:"))
    waits = sum(value for name, value in values.items() if name.startswith("waits:"))
    apart = ("data_wait", "checkpoint", "evaluation", "other")
    input_seconds = values.get("phase:data_wait", 0.0) - values.get("waits:data_wait", 0.0)
    checkpoint = sum(values.get(f"phase:{name}", 0.0) - values.get(f"waits:{name}", 0.0) for name in apart[1:3])
    idle = values["phase:other"] - values["waits:other"]
    bubble = min(bubble, waits)
    compute = wall - waits - input_seconds - checkpoint - idle
    return {
        "compute": max(compute, 0.0),
        "communication": waits - bubble,
        "bubble": bubble,
        "input": input_seconds,
        "checkpoint": checkpoint,
        "idle": idle,
    }


def _descheduled(step: RankStep, span_names: Sequence[str]) -> float:
    """Return the seconds in spans of computing in which the thread was neither on a processor nor waited for ranks."""
    spans = step.spans[step.spans["cpu_ns"] >= 0]
    if not len(spans):
        return 0.0
    lost = int((spans["duration_ns"] - spans["cpu_ns"]).sum())
    inside = _innermost(spans, step.collectives["waited_ns"]) >= 0
    return max(lost - int(step.collectives["exposed_ns"][inside].sum()), 0) / 1e9
