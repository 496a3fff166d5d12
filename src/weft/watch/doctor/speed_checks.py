"""Checks of a run's speed: what each finds costs seconds of every step, and one setting or one machine is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import MicrobatchPlan, Plan
from weft.formatting import format_bytes, format_number, format_percent, format_seconds
from weft.watch.accounting import axis_names, own_times
from weft.watch.doctor.run_case import RunCase, groups_along, hosts_of, others_took
from weft.watch.store import StepWindow
from weft.watch.verdicts import RunVerdict, judge, peers_of

_COMPUTING = ("forward", "backward", "optimizer")
"""Phases in which a rank works by itself."""
_WORTH = 0.1
"""Share of a step that a change must save, by the planner's word, to be named."""
_LEAST_SHARE = 0.05
_FAR_SLOWER = 3.0
"""Times that communication takes longer than predicted from which the link is at fault, and not the prediction."""
_MOST_OF_PEAK = 1.02
_WORTH_CUTTING = 0.02
"""Share of a step that other cuts of a pipeline must save."""
_FAR_FROM_EQUAL = 0.15
"""Share of a step that unequal stages cost from which the planner's own cuts are doubted."""
_OTHERS_SHARE = 0.1
"""Share of a step that other programs must take from ranks to be named."""
_BUSY = 0.2
"""Share of a step without a processor from which cores are busy with something else."""
_LONG_PHASE = 0.1
"""Share of what a rank computes from which a phase says whether the whole rank is slow."""
_LONG_RUN = 3.0
"""Seconds of steps that say who lacks a processor: that is counted once a second."""
_SUITABLE = ("communication", "bubble", "slow_input", "unequal_stages", "busy_cores", "slow_rank")


def live_verdicts(case: RunCase) -> Iterator[RunVerdict]:
    """Yield what `weft watch` says of the run, with settings of its plan.

    A rank that is slow in all that it does is one finding, and not one per phase."""
    if not case.is_timed:
        return
    # Where much had to be taken out, little is known of what is left; and threads that read lack a processor, too.
    least = {"slow_input": _BUSY, "slow_rank": _BUSY} if _is_busy(case) else {}
    found = [
        verdict
        for verdict in judge(_judged(case), case.facts)
        if verdict.kind in _SUITABLE and verdict.share >= least.get(verdict.kind, 0.0)
    ]
    throttled = list(_throttled(case, found))
    ranks = {rank for verdict in throttled for rank in verdict.ranks}
    yield from throttled
    for verdict in found:
        if verdict.kind in ("slow_rank", "busy_cores") and verdict.ranks and ranks.issuperset(verdict.ranks):
            continue  # the same, by phase
        if verdict.kind == "communication" and list(_links_of(case, verdict.axis)):
            continue  # `slow_link` says it, with the link's speed
        settled = _with_settings(case, verdict)
        if settled is not None:
            yield settled


def _judged(case: RunCase) -> StepWindow:
    """Return the steps that verdicts go by.  Ranks with more threads than cores take these from one another, whatever
    other programs do."""
    if not _has_too_many_threads(case):
        return case.window
    window, values = case.window, case.window.values.copy()
    if "descheduled" in window.columns:
        lost = np.nanmedian(case.recorded.column("descheduled"), axis=0)
        values[:, :, window.columns.index("descheduled")] = lost
    return window._replace(values=values)


def _has_too_many_threads(case: RunCase) -> bool:
    if case.plan is None or case.cluster is None:
        return False
    most, threads = (
        max((len(ranks) for ranks in hosts_of(case.facts).values()), default=0),
        case.plan.compute.num_threads,
    )
    return threads > 1 and most * threads > case.cluster.nodes[0].cores


def busy_machine(case: RunCase) -> Iterator[RunVerdict]:
    """Yield that other programs took the processors from ranks: nothing of the run is wrong."""
    if not case.is_timed or _has_too_many_threads(case):
        return
    took, steps = np.median(others_took(case.recorded), axis=0), case.recorded.column("wall")
    seconds, step = float(took.max(initial=0.0)), float(np.nanmedian(np.nanmax(steps, axis=1)))
    if seconds < _OTHERS_SHARE * step:
        return
    ranks = tuple(map(int, np.flatnonzero(took > 0.5 * seconds)))
    cores = float(np.nanmedian(np.nanmax(case.recorded.column("others") / np.maximum(steps, 1e-9), axis=1)))
    yield RunVerdict(
        kind="busy_machine",
        title=f"Other programs computed on {format_number(cores, 2)} cores meanwhile: ranks waited"
        f" {format_seconds(seconds, 2)} of each step for a processor.",
        seconds=seconds, share=seconds / step, confidence="high", num_steps=len(steps),
        ranks=() if len(ranks) == len(took) else ranks,
        evidence=("this is the machine's, and no fault of the run: everything else is judged without it",),
        next="Look with top what runs there, and stop it; or give the job cores of its own, or fewer ranks (weft replan"
        " RUN --devices N).",
    )  # fmt: skip


def _throttled(case: RunCase, found: Sequence[RunVerdict]) -> Iterator[RunVerdict]:
    """Yield ranks that compute slower than their peers in every phase, by about the same factor."""
    phases = [name for name in _COMPUTING if f"phase:{name}" in case.window.columns]
    own = own_times(case.window, phases)
    suspects = {rank for verdict in found if verdict.kind == "slow_rank" for rank in verdict.ranks}
    for peers in peers_of(case.facts, own.shape[1]):
        for rank in sorted(suspects.intersection(peers)):
            others = [peer for peer in peers if peer not in suspects] or [peer for peer in peers if peer != rank]
            mine, usual = (np.nanmedian(own[:, ranks, :], axis=(0, 1)) for ranks in ([rank], others))
            # A rank that is stopped now and then is seldom stopped in its short phases.
            is_long = usual > _LONG_PHASE * usual.sum()
            factors = mine[is_long] / usual[is_long]
            if len(factors) < 2 or factors.min() < 1.15:
                continue
            seconds = float((mine - usual).sum())
            factor = float(mine.sum() / usual.sum())
            lost = float(np.nanmedian(case.window.column("descheduled")[:, rank]))
            why = (
                f"its thread was without a processor for {format_seconds(lost, 2)} of each step: something takes its"
                " time there, or a control group holds it back"
                if lost > 0.3 * seconds
                else "its thread seldom waited for a processor: the processor is slow, or the process was stopped"
            )
            yield RunVerdict(
                kind="throttled_rank",
                title=f"Rank {rank} computes {format_number(factor, 2)} times slower than ranks with as much to do, in"
                f" every long phase: the job waits {format_seconds(seconds)} per step for it.",
                seconds=seconds, share=seconds / case.step_seconds, confidence="high", ranks=(rank,),
                num_steps=len(case.window.steps),
                evidence=(*(f"{name}: {format_seconds(float(one))}, its peers {format_seconds(float(other))}"
                            for name, one, other in zip(phases, mine, usual, strict=True)), why),
                next=f"Look at {_place(case, rank)}: its limits (cpu.max), clock rate and temperature, and what else"
                " runs there. Leave the device out if it stays (weft replan RUN --devices N).",
            )  # fmt: skip


def _place(case: RunCase, rank: int) -> str:
    about = case.facts.ranks[rank] if rank < len(case.facts.ranks) else {}
    return f"host {about['host']}" if about.get("host") else f"the place of rank {rank}"


def _with_settings(case: RunCase, verdict: RunVerdict) -> RunVerdict | None:
    """Add to a live verdict what the plan says of it; None where no plan does better."""
    plan = case.plan
    if plan is None:
        return verdict
    if verdict.kind == "busy_cores":
        return _with_threads(case, verdict, plan.compute.num_threads)
    if verdict.kind != "unequal_stages":
        return verdict
    cuts = plan.pipeline_parallel.cuts
    balanced = replace(plan, pipeline_parallel=replace(plan.pipeline_parallel, cuts=None))
    gain = 0.0 if cuts is None else case.gain_of(balanced)
    if (gain is not None and gain < _WORTH_CUTTING) and verdict.share < _FAR_FROM_EQUAL:
        return None  # blocks are whole: stages that are cut by cost are seldom equal
    if cuts is None or gain is None or gain < _WORTH_CUTTING:
        return verdict
    return replace(
        verdict,
        next=f"Take pipeline_parallel.cuts = {list(cuts)} out of the plan: stages are then cut by their cost.",
        promise=case.promise_of("cuts by cost", gain),
    )


def _with_threads(case: RunCase, verdict: RunVerdict, threads: int) -> RunVerdict | None:
    """Say whether the job itself has more threads than there are cores, or something else takes them; None where each
    has a core and lacks it seldom, for the threads that read data and record, and the system."""
    most = max((len(ranks) for ranks in hosts_of(case.facts).values()), default=0)
    cores = None if case.cluster is None else case.cluster.nodes[0].cores
    told = f"{most} rank{'s' if most != 1 else ''} of {threads} thread{'s' if threads != 1 else ''} on one host"
    told += "" if cores is None else f" of {cores} cores"
    if threads > 1 and (cores is None or most * threads > cores):
        change = f"Set compute.threads_per_rank = {1 if cores is None else max(1, cores // max(1, most))} in the plan."
    elif cores is not None and most > cores:
        change = f"Run at most {cores} ranks on this host: weft replan RUN --devices {cores}."
    elif verdict.share < _BUSY or float(np.nansum(np.nanmax(case.recorded.column("wall"), axis=1))) < _LONG_RUN:
        return None
    else:
        change = (
            "The job has a core for each of its threads, so something else computes there: look with top, stop it, or"
        )
        change += " give the job fewer ranks (weft replan RUN --devices N)."
    return replace(verdict, evidence=(*verdict.evidence, told), next=change)


def tiny_microbatches(case: RunCase) -> Iterator[RunVerdict]:
    """Yield microbatches that are so small that starting the operators takes longer than computing them."""
    plan = case.plan
    if plan is None or not case.is_timed or plan.microbatch.has_unequal_shares:
        return
    number, share = plan.microbatch.shares(1)[0], case.peak_share
    best: tuple[float, Plan] | None = None
    for factor in (2, 4, 8, 16, 32):
        if number % factor:
            break
        larger = replace(plan, microbatch=MicrobatchPlan.of(plan.microbatch.size * factor, (number // factor,)))
        gain = case.gain_of(larger)
        if gain is not None and (best is None or gain > best[0] + 0.02):
            best = gain, larger
    if best is None or best[0] < _WORTH:
        return
    gain, larger = best
    told = [f"{number} microbatches of {plan.microbatch.size} a step on each rank"]
    told += [f"{format_percent(100 * share)} of the measured peak"] if share is not None else []
    change = f"microbatch.size = {larger.microbatch.size}"
    yield RunVerdict(
        kind="tiny_microbatches",
        title=f"Microbatches of {plan.microbatch.size} are too small: about {format_seconds(gain * case.step_seconds)}"
        " of each step go into starting operators and into short products.",
        seconds=gain * case.step_seconds, share=gain, confidence="medium", num_steps=len(case.window.steps),
        phase="forward_backward", evidence=tuple(told),
        next=f"Set {change} and microbatch.per_step = {larger.microbatch.shares(1)[0]}; its memory fits.",
        promise=case.promise_of(change, gain),
    )  # fmt: skip


def unused_precision(case: RunCase) -> Iterator[RunVerdict]:
    """Yield that the plan computes in fp32 where the recipe permits bf16 and the devices are faster in it."""
    recipe, plan, cluster = case.recipe, case.plan, case.cluster
    if recipe is None or plan is None or cluster is None:
        return
    if plan.compute.precision != "fp32" or "bf16" not in recipe.permit.precision:
        return
    devices = cluster.nodes[0].devices
    peaks = {**devices.peak_flops, **devices.measured_flops}
    if peaks.get("bf16", 0.0) < 1.5 * peaks.get("fp32", 0.0) or not peaks.get("fp32"):
        return
    factor = peaks["bf16"] / peaks["fp32"]
    gain = case.gain_of(replace(plan, compute=replace(plan.compute, precision="bf16")))
    if gain is not None and gain < _LEAST_SHARE:
        return
    share = gain or 0.0
    yield RunVerdict(
        kind="unused_precision",
        title=f"The run computes in fp32; its recipe permits bf16, in which the devices are {format_number(factor, 2)}"
        " times faster.",
        seconds=share * case.step_seconds, share=share, confidence="medium", num_steps=len(case.window.steps),
        evidence=(f"permit.precision = {list(recipe.permit.precision)}",
                  f"{devices.kind}: {_tera(peaks['fp32'])} in fp32, {_tera(peaks['bf16'])} in bf16"),
        next='Set compute.precision = "bf16" in the plan; weights and their updates stay in fp32.',
        promise=case.promise_of("bf16", share) if share > 0 else "",
    )  # fmt: skip


def wrong_peak(case: RunCase) -> Iterator[RunVerdict]:
    """Yield a peak by which shares are wrong: above 1, or far from what the run measured."""
    share, facts = case.peak_share, case.facts
    if share is not None and share > _MOST_OF_PEAK:
        yield RunVerdict(
            kind="wrong_peak",
            title=f"The run reaches {format_percent(100 * share)} of its peak, which no device can: the peak is wrong.",
            seconds=0.0, share=0.0, confidence="high", num_steps=len(case.window.steps),
            evidence=(f"{_tera(facts.alone_flops or facts.peak_flops)} was measured for {facts.world_size} ranks"
                      " together",
                      f"{format_number(facts.model_flops / 1e12)} TFLOP in {format_seconds(case.step_seconds)}"),
            next="It is measured as a run begins: begin it again.",
        )  # fmt: skip
        return
    if case.cluster is None or case.plan is None or not facts.alone_flops or _has_too_many_threads(case):
        return  # threads that wait for one another's core measure no peak
    devices, precision = case.cluster.nodes[0].devices, case.plan.compute.precision
    stated = devices.peak_flops.get(precision)
    if stated is None:
        return
    threads = case.plan.compute.num_threads if devices.kind == "cpu" else 1
    stated *= min(threads, max(1, case.cluster.nodes[0].cores))
    measured = facts.alone_flops / facts.world_size
    if 1 / 4 <= measured / stated <= 1.3:
        return
    word = "more" if measured > stated else "less"
    yield RunVerdict(
        kind="wrong_peak",
        title=f"The cluster states {_tera(stated)} a rank in {precision}, and the run measured {_tera(measured)}:"
        f" {format_number(max(measured / stated, stated / measured), 2)} times {word}.",
        seconds=0.0, share=0.0, confidence="medium", num_steps=len(case.window.steps),
        evidence=("predictions and the share of the peak stand on this figure",),
        next=f"Measure it (weft probe), or correct peak_flops.{precision} of the cluster file.",
    )  # fmt: skip


def _is_busy(case: RunCase) -> bool:
    """Whether ranks often get no processor."""
    lost = case.recorded.column("descheduled")
    return lost.size > 0 and float(np.nanmedian(lost)) > _BUSY * float(np.nanmedian(case.recorded.column("wall")))


def slow_links(case: RunCase) -> Iterator[RunVerdict]:
    """Yield axes whose communication takes far longer than predicted, or than in other groups of the axis.

    Where ranks wait for a processor nothing is said: a rank that does not run sends nothing, over any link.
    """
    if case.is_timed and not _is_busy(case):
        for axis in axis_names(case.window.columns):
            yield from _links_of(case, axis)


def _links_of(case: RunCase, axis: str) -> Iterator[RunVerdict]:
    if axis == "world":
        return
    # A rank that has less to do than another may wait for it there: that is none of the link's.
    exposed = np.maximum(case.window.column(f"exposed:{axis}") - _slack(case), 0.0)
    groups = groups_along(case.facts, axis) or [list(range(exposed.shape[1]))]
    # What the rank that waits least of a group still waits is the transfer; the rest is for ranks that come late.
    transfers = np.array([float(np.nanmedian(np.nanmin(exposed[:, ranks], axis=1))) for ranks in groups])
    worst = int(transfers.argmax())
    expected = float(np.median(np.delete(transfers, worst))) if len(groups) > 1 else 0.0
    basis = "other groups of the axis take"
    predicted = float(case.facts.predicted.get("seconds", {}).get(axis, 0.0))
    if transfers[worst] < _FAR_SLOWER * expected or len(groups) < 2:
        if not predicted:
            return
        expected, basis = predicted, "was predicted"
    seconds = float(transfers[worst]) - expected
    if transfers[worst] < _FAR_SLOWER * expected or seconds < 2 * _LEAST_SHARE * case.step_seconds:
        return
    ranks = groups[worst]
    hosts = sorted({str(case.facts.ranks[rank].get("host", "")) for rank in ranks if rank < len(case.facts.ranks)})
    speed = _speed(case, axis, ranks[0], float(transfers[worst]))
    yield RunVerdict(
        kind="slow_link",
        title=f"The {axis} axis takes {format_seconds(float(transfers[worst]))} of each step to send;"
        f" {format_seconds(expected)} {basis}.",
        seconds=seconds, share=seconds / case.step_seconds, confidence="high" if "other" in basis else "medium",
        num_steps=len(case.window.steps), axis=axis, ranks=tuple(ranks) if len(groups) > 1 else (),
        evidence=(*([speed] if speed else []), f"ranks {', '.join(map(str, ranks[:8]))} on {', '.join(hosts[:4])}"),
        next="Look which interface and which link joins these hosts; compare with weft probe there. Until then let less"
        f" go over it: another order of mesh axes (mesh.order), larger microbatches, or a smaller {axis} axis.",
    )  # fmt: skip


def _slack(case: RunCase) -> NDArray[np.float32]:
    """Return how much less than the busiest rank each has to do by itself: shape (steps, ranks)."""
    window = case.window
    own = window.column("wall") - window.column("communication") - window.column("bubble")
    return np.nanmax(own, axis=1, keepdims=True) - own


def _speed(case: RunCase, axis: str, rank: int, seconds: float) -> str:
    """Say how many bytes of a rank went along an axis in a step, and how fast."""
    sums = case.record.traffic().get(rank, {}).get(axis, {})
    num_bytes = sum(int(size) for _, size in sums.values())
    if not num_bytes or seconds <= 0:
        return ""
    return f"{format_bytes(num_bytes)} in {format_seconds(seconds)}: {format_bytes(num_bytes / seconds)}/s"


def _tera(flops: float) -> str:
    return f"{format_number(flops / 1e12)} TFLOP/s" if flops >= 1e11 else f"{format_number(flops / 1e9)} GFLOP/s"
