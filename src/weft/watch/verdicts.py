"""What holds a run back: verdicts with evidence, and "unknown" where the record does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.watch.accounting import frontier, own_times, phase_names, phase_title
from weft.watch.store import GenerationFacts, StepWindow

LEAST_STEPS = 5
"""Recorded steps before anything is said."""
SURE_STEPS = 20
"""Recorded steps before a verdict can be sure."""
MOST_STEPS = 60
"""Steps that say how a run goes now, at most: see `newest_steps`."""
_NOW_SECONDS = 2.0
_LEAST_SHARE = 0.05
"""Share of the step below which nothing holds it back."""
_UNEVEN = ("data_wait", "checkpoint", "evaluation", "")
"""Phases whose time says nothing about that of the next; the empty one is a loop between its steps."""
_UNEVEN_SECONDS = 60.0
"""Time without a step after which a run counts as stalled that is in such a phase, or has no steps to compare with."""
_LEAST_STALL_SECONDS = 5.0
_HIDDEN = ("checkpoint", "evaluation")
"""Phases that are no part of every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """One thing that holds the run back."""

    kind: str
    """`slow_rank`, `slow_input`, `busy_cores`, `unequal_stages`, `communication`, `bubble`, `hang` or `unknown`."""
    title: str
    """One sentence: who, where, and what it costs."""
    seconds: float
    """Seconds per step that it costs; for a hang, those since the last step."""
    share: float
    """Share of the step, 0 to 1."""
    confidence: str
    """`low`, `medium` or `high`."""
    num_steps: int
    """Steps that it was judged by."""
    ranks: tuple[int, ...] = ()
    """Ranks that cause it; empty: all alike."""
    phase: str = ""
    axis: str = ""
    evidence: tuple[str, ...] = ()
    next: str = ""
    """The next thing to try."""
    promise: str = ""
    """What the planner, corrected by what was measured, says that it would bring; empty where it was not asked."""

    @property
    def is_of_run(self) -> bool:
        """Whether it is a fault of the run, and not what other programs did to its machine."""
        return self.kind != "busy_machine"

    def document(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**asdict(self), "ranks": list(self.ranks), "evidence": list(self.evidence)}


def newest_steps(window: StepWindow) -> StepWindow:
    """Return the steps that say how the run goes now: those of its newest two seconds, at least 20 and at most 60.

    What changes is a verdict once it holds for three of four of them, so that a step of 100 ms tells it after 1.5 s.
    """
    times = window.unix_times
    number = int((times > times[-1] - _NOW_SECONDS).sum()) if len(times) else 0
    return _without(window, np.arange(len(times)) < len(times) - min(max(number, SURE_STEPS), MOST_STEPS))


def judge(window: StepWindow, facts: GenerationFacts) -> list[RunVerdict]:
    """Return what holds the steps of a window back, the costliest first.

    One entry of kind `unknown` says that nothing does, or that too little was recorded.  The first step of a
    generation, which compiles and warms up, is not judged.
    """
    window = _without(window, window.num_steps != 1)
    if len(window.steps) and window.steps[0] == 1:
        window = _without(window, np.arange(len(window.steps)) == 0)
    if len(window.steps) < LEAST_STEPS:
        return [_unknown(f"{len(window.steps)} steps are recorded; {LEAST_STEPS} are needed.", len(window.steps))]
    step = float(np.nanmedian(np.nanmax(window.column("wall"), axis=1)))
    found = [
        *_slow_ranks(window, facts, step),
        *_slow_input(window, step),
        *_busy_cores(window, facts, step),
        *_unequal_stages(window, facts, step),
        *_waits(window, facts, step),
    ]
    if not found:
        return [_unknown("nothing that is recorded takes more than its part of the step.", len(window.steps))]
    return sorted(found, key=lambda verdict: -verdict.seconds)


def _without(window: StepWindow, left_out: Any) -> StepWindow:
    keep = ~left_out
    return window._replace(
        steps=window.steps[keep],
        num_steps=window.num_steps[keep],
        unix_times=window.unix_times[keep],
        values=window.values[keep],
    )


def _unknown(why: str, num_steps: int) -> RunVerdict:
    return RunVerdict(kind="unknown", title=f"Nothing is known to hold the run back: {why}", seconds=0.0, share=0.0,
                   confidence="low", num_steps=num_steps)  # fmt: skip


def _slow_ranks(window: StepWindow, facts: GenerationFacts, step: float) -> Iterator[RunVerdict]:
    """Yield ranks that are slower in a phase than those that have equally much to do in it."""
    phases = [name for name in phase_names(window.columns) if name not in _HIDDEN]
    own = own_times(window, phases)  # steps × ranks × phases
    for peers in peers_of(facts, own.shape[1]):
        if len(peers) < 2:
            continue
        mine = own[:, peers, :]
        # Against the fastest half of its peers: with two ranks the other one, with four the median.
        usual = np.nanmedian(np.sort(mine, axis=1)[:, : max(1, len(peers) // 2), :], axis=1, keepdims=True)
        excess = np.nanmedian(mine - usual, axis=0)  # ranks × phases
        spread = np.nanmedian(np.abs(mine - usual - excess[None]), axis=0)
        for place, phase in np.argwhere((excess > _LEAST_SHARE * step) & (excess > 2 * spread) & (excess > 5e-4)):
            slower = float(np.mean((mine - usual)[:, place, phase] > 0.5 * excess[place, phase]))
            seconds, name = float(excess[place, phase]), phases[phase]
            if slower < 0.75:
                continue
            rank = int(peers[place])
            title = (
                f"Rank {rank}{_where(facts, rank)} holds the step back by {_seconds(seconds)} in its phase"
                f" “{phase_title(name)}”."
            )
            evidence = (
                f"its own time there is {_seconds(float(np.nanmedian(mine[:, place, phase])))} in the median of"
                f" {len(mine)} steps, that of its peers {_seconds(float(np.nanmedian(usual[:, 0, phase])))}",
                f"it was slower in {round(100 * slower)} % of these steps",
            )
            yield RunVerdict(
                kind="slow_rank", title=title, seconds=seconds, share=seconds / step, num_steps=len(mine),
                confidence=_confidence(len(mine), slower), ranks=(rank,), phase=name, evidence=evidence,
                next=_next_for(name),
            )  # fmt: skip


def _next_for(phase: str) -> str:
    if phase == "data_wait":
        return "Look at the storage and the data workers of this host; data.prefetch_workers gives it more of them."
    if phase == "other":
        return "Look at what the loop does between steps on this rank."
    return "Look at what else runs on this host, at its clock rate and temperature; leave the host out if it stays."


def _slow_input(window: StepWindow, step: float) -> Iterator[RunVerdict]:
    """Yield that all ranks wait for data."""
    waits = np.nanmedian(window.column("input"), axis=0)
    seconds = float(np.nanmedian(waits)) if len(waits) else 0.0
    if seconds > _LEAST_SHARE * step:
        yield RunVerdict(
            kind="slow_input", title=f"Every rank waits {_seconds(seconds)} per step for its data.", seconds=seconds,
            share=seconds / step, confidence=_confidence(len(window.steps), 1.0), num_steps=len(window.steps),
            phase="data_wait", evidence=(f"median over {len(waits)} ranks and {len(window.steps)} steps",),
            next="Prepare the data once (weft data prepare), or give more workers (data.prefetch_workers).",
        )  # fmt: skip


def _busy_cores(window: StepWindow, facts: GenerationFacts, step: float) -> Iterator[RunVerdict]:
    """Yield that ranks are ready to compute and get no processor."""
    lost = np.nanmedian(window.column("descheduled"), axis=0)
    seconds = float(np.nanmax(lost, initial=0.0))
    if seconds > 2 * _LEAST_SHARE * step:
        ranks = np.flatnonzero(lost > 0.5 * seconds)
        where = "Every rank" if len(ranks) == len(lost) else f"{'Ranks' if len(ranks) > 1 else 'Rank'} {_few(ranks)}"
        yield RunVerdict(
            kind="busy_cores",
            title=f"{where} {'is' if len(ranks) == 1 or len(ranks) == len(lost) else 'are'} ready to compute and"
            f" without a processor for {_seconds(seconds)} per step.",
            seconds=seconds, share=seconds / step, confidence=_confidence(len(window.steps), 1.0),
            num_steps=len(window.steps), ranks=() if len(ranks) == len(lost) else tuple(map(int, ranks)),
            evidence=("time in which the thread that computes was ready to run, by the system's scheduler",),
            next="Run fewer ranks or fewer threads than the host has free cores (compute.threads_per_rank), or stop"
            " what else runs there.",
        )  # fmt: skip


def _unequal_stages(window: StepWindow, facts: GenerationFacts, step: float) -> Iterator[RunVerdict]:
    """Yield that a stage of a pipeline has more to compute than the others."""
    stages = stages_of(facts)
    if len(stages) < 2:
        return
    busy = _busy_of(window)
    by_stage = np.array([np.nanmedian(busy[ranks]) for ranks in stages])
    seconds = float(by_stage.max() - by_stage.mean())
    if seconds > _LEAST_SHARE * step:
        slowest = int(by_stage.argmax())
        yield RunVerdict(
            kind="unequal_stages",
            title=f"Stage {slowest} computes {_seconds(float(by_stage.max()))} per step, the mean of all stages is"
            f" {_seconds(float(by_stage.mean()))}: the others wait {_seconds(seconds)}.",
            seconds=seconds, share=seconds / step, confidence=_confidence(len(window.steps), 1.0),
            num_steps=len(window.steps), ranks=tuple(stages[slowest]), phase="forward", axis="pipeline",
            evidence=tuple(f"stage {stage}: {_seconds(float(value))}" for stage, value in enumerate(by_stage)),
            next="Move blocks between stages (pipeline_parallel.cuts), or let weft plan choose the cuts.",
        )  # fmt: skip


def _busy_of(window: StepWindow) -> NDArray[np.float32]:
    """Return each rank's own time in forward and backward, in seconds per step."""
    return np.nanmedian(own_times(window, ["forward", "backward"]).sum(axis=2), axis=0)


def _waits(window: StepWindow, facts: GenerationFacts, step: float) -> Iterator[RunVerdict]:
    """Yield that the pipeline's schedule, or communication, takes a large part of every rank's step."""
    # Equal stages would wait less by what the busiest rank has more to do: that part is `unequal_stages`.
    busy = _busy_of(window)
    bubble = float(np.nanmedian(np.nanmedian(window.column("bubble"), axis=0) - (busy.max(initial=0.0) - busy)))
    if bubble > 0.2 * step:
        yield RunVerdict(
            kind="bubble", title=f"Ranks wait {_seconds(bubble)} of each step for other stages of the pipeline.",
            seconds=bubble, share=bubble / step, confidence=_confidence(len(window.steps), 1.0),
            num_steps=len(window.steps), axis="pipeline",
            evidence=("median over ranks and steps, without what unequal stages cost",),
            next="Use more microbatches (microbatch.size smaller), or a schedule with less bubble.",
        )  # fmt: skip
    for column in window.columns:
        axis = column.removeprefix("exposed:")
        if column == axis or axis in ("pipeline", "world"):
            continue
        # What the rank that waits least still waits is the transfer; the rest is for ranks that come late.
        seconds = float(np.nanmedian(np.nanmin(window.column(column), axis=1)))
        if seconds > 0.2 * step:
            yield RunVerdict(
                kind="communication",
                title=f"Communication along the {axis} axis takes {_seconds(seconds)} of each step that nothing hides.",
                seconds=seconds, share=seconds / step, confidence=_confidence(len(window.steps), 1.0),
                num_steps=len(window.steps), axis=axis, evidence=("exposed time of the rank that waits least",),
                next=f"Ask weft plan for a smaller {axis} axis, larger microbatches, or compression if the recipe"
                " permits it.",
            )  # fmt: skip


def peers_of(facts: GenerationFacts, num_ranks: int) -> list[list[int]]:
    """Return groups of ranks that have equally much to do: those of one pipeline stage."""
    return stages_of(facts) or [list(range(num_ranks))]


def stages_of(facts: GenerationFacts) -> list[list[int]]:
    """Return the ranks of each index on the pipeline axis; empty where the plan has none."""
    if facts.axes.get("pipeline", 1) < 2 or not facts.ranks:
        return []
    stages: list[list[int]] = [[] for _ in range(facts.axes["pipeline"])]
    for rank, about in enumerate(facts.ranks):
        coordinates: Mapping[str, int] = about.get("coordinates", {})
        stages[coordinates.get("pipeline", 0)].append(rank)
    return stages


def frontier_line(window: StepWindow) -> list[tuple[str, float]]:
    """Return the mean seconds per step that each phase adds to the job's step; they sum to the step."""
    line = frontier(window)
    return [(name, float(value)) for name, value in zip(line.phases, line.seconds.mean(axis=0), strict=True)]


def _confidence(num_steps: int, agreement: float) -> str:
    if num_steps >= SURE_STEPS and agreement >= 0.8:
        return "high"
    return "medium" if num_steps >= LEAST_STEPS and agreement >= 0.7 else "low"


def _where(facts: GenerationFacts, rank: int) -> str:
    if rank >= len(facts.ranks):
        return ""
    host = facts.ranks[rank].get("host")
    return f" on host {host}" if host else ""


def _few(ranks: Sequence[int] | Any, most: int = 8) -> str:
    numbers = [str(int(rank)) for rank in ranks]
    return ", ".join(numbers[:most]) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"


def judge_stall(
    live: Mapping[int, Mapping[str, Any]],
    facts: GenerationFacts,
    *,
    stalled_seconds: float,
    step_seconds: Sequence[float],
) -> RunVerdict | None:
    """Return that the run makes no step, and for which rank the others wait; None where it goes on.

    `live` are the states of `TelemetryWriter.live`; `step_seconds` those of the latest steps.  A rank that waits in a
    collective is not to blame, unless its process is stopped.
    """
    states = {rank: state for rank, state in live.items() if state["has_begun"] and not state["has_ended"]}
    if any(state.get("is_stopped") for state in states.values()):
        limit = _LEAST_STALL_SECONDS  # whatever its steps take: nothing that a run does looks like this
    else:
        # A few long steps do not count, such as one that the stall before this one has made long.
        usual = float(np.quantile(step_seconds, 0.9)) if len(step_seconds) else _UNEVEN_SECONDS / 3
        is_uneven = any(state["phase"] in _UNEVEN for state in states.values())
        limit = max(_LEAST_STALL_SECONDS, 3 * usual, _UNEVEN_SECONDS if is_uneven else 0.0)
    if not states or len(states) < len(live) or stalled_seconds < limit:
        return None
    missing = _missing(states)
    waiting = [state["open"] for rank, state in states.items() if rank not in missing and state["open"] is not None]
    inside = waiting[0] if waiting else None
    collective = f" in {inside['operation']} of the {inside['axis']} axis" if inside else ""
    if not missing:
        title = f"No step for {_seconds(stalled_seconds)}: which rank holds the others up is not known."
    else:
        stopped = all(states[rank].get("is_stopped") for rank in missing)
        who = f"Rank {missing[0]}{_where(facts, missing[0])}" if len(missing) == 1 else f"Ranks {_few(missing)}"
        what = ("is" if len(missing) == 1 else "are") + (" stopped (SIGSTOP)" if stopped else " in no collective")
        title = f"No step for {_seconds(stalled_seconds)}: {who} {what}; the others wait{collective}."
    phases = sorted({f"{states[rank]['phase'] or 'between phases'}" for rank in missing})
    return RunVerdict(
        kind="hang", title=title, seconds=stalled_seconds, share=1.0, num_steps=0,
        confidence="high" if len(missing) == 1 else "medium" if missing else "low", ranks=tuple(missing),
        phase=phases[0] if len(phases) == 1 else "", axis=inside["axis"] if inside else "",
        evidence=(
            *(f"rank {rank}: step {states[rank]['step'] + 1}, {phase_title(states[rank]['phase'])}"
              for rank in missing[:4]),
            f"{len(waiting)} of {len(states)} ranks wait in a collective",
        ),
        next="Look at its stack: weft watch shows it on the page Hang; the supervisor ends the run, or starts it again,"
        " by its policy for hangs.",
    )  # fmt: skip


def _missing(states: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that the others wait for."""
    stopped = [rank for rank, state in states.items() if state.get("is_stopped")]
    if stopped:
        return stopped
    outside = [rank for rank, state in states.items() if state["open"] is None]
    if outside and len(outside) < len(states):
        return outside
    # All wait, and not all in the same collective: those that are behind in it hold the others up.
    behind = min(state["step"] for state in states.values())
    late = [rank for rank, state in states.items() if state["step"] == behind]
    return late if len(late) < len(states) else []
