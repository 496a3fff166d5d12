"""What a recorded run teaches the planner: medians of its steady steps, without the time that other work took."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import Cluster
from weft.config.plan import Plan, parse_plan
from weft.errors import WeftError
from weft.formatting import format_number, format_percent
from weft.model.profile import Profile
from weft.planning.learned import (
    MOST_DESCHEDULED,
    MeasuredTerms,
    RecordedRun,
    formulas_digest,
    price_step,
    torch_version,
)
from weft.techniques.check import mesh_sizes
from weft.techniques.cost_terms import Layout
from weft.watch.accounting import ACTIONS, TERM_OF_AXIS, axis_names, own_times
from weft.watch.run_record import RunRecord
from weft.watch.store import StepWindow

_WARM_UP = 5
"""First steps of a generation that are left out; of a long window a tenth."""
_FEWEST = 12
"""Steady steps from which a run is learned from."""
BUSY = "other work"
"""Begin of the reason of a run that other work has disturbed."""
_COMPUTING = (*ACTIONS, "forward_backward")


def run_to_learn(record: RunRecord, profile: Profile, cluster: Cluster) -> RecordedRun | str:
    """Return what the newest generation of a run took beside its price, or why nothing is learned from it."""
    if cluster.has_accelerators or cluster.num_nodes > 1:
        return "only runs on the cores of one machine correct predictions"
    if not record.is_recorded or not record.facts.plan:
        return "it was not recorded"
    try:
        plan = parse_plan(record.facts.plan)
        if reason := _refusal(plan, cluster):
            return reason
        window = _steady(record.window)
        if len(window.steps) < _FEWEST:
            return f"it has {len(window.steps)} steps beside the first ones, and {_FEWEST} are needed"
        share = _descheduled(window)
        if share > MOST_DESCHEDULED:
            return (
                f"{BUSY} took {format_percent(100 * share)} of its time on the cores, above"
                f" {format_percent(100 * MOST_DESCHEDULED)}"
            )
        layout = Layout.of(plan)
        cores = cluster.num_cores / layout.world_size
        return RecordedRun(
            ended=int(window.unix_times[-1]),
            torch=torch_version(),
            formulas=formulas_digest(),
            model=f"{profile.name}, {format_number(profile.num_parameters / 1e6)} M parameters",
            plan=f"{mesh_sizes(plan)}, {plan.data_parallel.stage_name}",
            precision=layout.precision,
            cores=cores,
            steps=len(window.steps),
            descheduled=round(share, 4),
            priced=price_step(profile, cluster, layout, cores),
            measured=_measured(window, is_pipeline=layout.pipeline > 1),
        )
    except (WeftError, ValueError) as error:
        return str(error).splitlines()[0]


def _refusal(plan: Plan, cluster: Cluster) -> str:
    """Return why no run under a plan says anything of prices; empty where it does."""
    world, cores = plan.mesh.world_size, cluster.num_cores
    if world > cores:
        return f"its {world} ranks shared {cores} cores"
    if plan.compute.compile:
        return "its blocks were compiled, which prices do not know"
    if plan.compute.num_threads != cores // world:
        return f"its ranks had {plan.compute.num_threads} threads, and prices take {cores // world}"
    return ""


def _steady(window: StepWindow) -> StepWindow:
    """Return the steady steps of a window that have least been disturbed: of those behind the warm-up the half in which
    the cores were taken away least."""
    first = int(window.steps[0])
    warm = max(_WARM_UP - first + 1, len(window.steps) // 10, 0)
    window = _pick(window, np.arange(len(window.steps)) >= warm)
    window = _pick(window, np.isfinite(window.column("wall")).all(axis=1) & (window.num_steps == 1))
    if len(window.steps) < 2 * _FEWEST:
        return window
    away = window.column("descheduled").sum(axis=1) / window.column("wall").sum(axis=1)
    order = np.argsort(away, kind="stable")
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[: len(order) // 2]] = True
    return _pick(window, chosen)


def _pick(window: StepWindow, keep: NDArray[np.bool_]) -> StepWindow:
    return window._replace(
        steps=window.steps[keep],
        num_steps=window.num_steps[keep],
        unix_times=window.unix_times[keep],
        values=window.values[keep],
    )


def _descheduled(window: StepWindow) -> float:
    return float(window.column("descheduled").sum() / max(float(window.column("wall").sum()), 1e-9))


def _measured(window: StepWindow, *, is_pipeline: bool) -> MeasuredTerms:
    """Return the medians over steps.

    Prices are of the slowest rank: that is the one that computes longest, and waits least for the others.  Ranks of a
    pipeline have work of their own, of which prices take the mean.
    """
    wall, compute, away = (window.column(name).astype(np.float64) for name in ("wall", "compute", "descheduled"))
    # What was taken away, was from what the rank had to do: computing and the optimizer in proportion.
    here = 1.0 - np.clip(away / np.maximum(compute, 1e-9), 0.0, 0.9)
    own = own_times(window, (*_COMPUTING, "optimizer", "reduce_wait")).astype(np.float64) * here[:, :, None]
    computing, optimizer = own[:, :, : len(_COMPUTING)].sum(axis=2), own[:, :, len(_COMPUTING) :].sum(axis=2)
    sent = np.zeros(wall.shape)
    for axis in axis_names(window.columns):
        if TERM_OF_AXIS.get(axis, "") not in ("", "pipeline"):
            sent += window.column(f"exposed:{axis}")
    bubble = window.column("bubble").astype(np.float64)
    reduced = np.mean if is_pipeline else np.max
    parts = {
        "computing": float(np.median(reduced(computing, axis=1))),
        "communication": float(np.median(sent.min(axis=1))),
        "bubble": float(np.median(bubble.mean(axis=1))),
        "optimizer": float(np.median(reduced(optimizer, axis=1))),
    }
    parts["step"] = float(np.median(wall.max(axis=1) - away.mean(axis=1)))
    parts["other"] = float(np.median((window.column("input") + window.column("idle")).mean(axis=1)))
    return MeasuredTerms(**{name: float(f"{seconds:.4g}") for name, seconds in parts.items()})
