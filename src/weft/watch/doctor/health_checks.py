"""Checks of a run's health: saves, memory, failures, experts, and whether it learns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.recipe import Recipe, parse_recipe
from weft.errors import WeftError
from weft.formatting import format_bytes, format_memory, format_number, format_percent, format_seconds
from weft.watch.doctor.run_case import LEAST_STEPS, RunCase
from weft.watch.run_record import RunRecord
from weft.watch.verdicts import RunVerdict

_SAVES_SHARE = 0.03
"""Share of a run's time that may be spent in saves."""
_GOOD_SAVES_SHARE = 0.01
_GROWTH_SHARE = 0.05
_GROWTH_BYTES = 4 << 20
_LEAST_LOSSES = 40
_MOST_SIBLINGS = 8


def slow_saves(case: RunCase) -> Iterator[RunVerdict]:
    """Yield that training waits for its saves, that copies take longer than the time between them, or that they
    fail."""
    saves = [event for event in case.record.events if event.get("kind") == "checkpoint"]
    failed = [save for save in saves if save.get("problem")]
    if failed:
        yield _finding(
            case, "failed_saves",
            f"{len(failed)} of {len(saves)} saves failed, the last one in step {failed[-1]['step']}.",
            evidence=(str(failed[-1]["problem"]),),
            next="Make room on the disk of the run's folder, or save elsewhere (run.checkpoints).",
        )  # fmt: skip
    good = [save for save in saves if not save.get("problem")]
    elapsed = sum(row.seconds * row.num_steps for row in case.record.steps)
    if len(good) < 2 or elapsed <= 0:
        return
    waited = sum(float(save.get("seconds") or 0.0) for save in good)
    copied = [float(save.get("copy_seconds") or 0.0) for save in good]
    share, every = waited / elapsed, _interval_steps(good)
    between = every * case.step_seconds
    if share > _SAVES_SHARE:
        each = waited / len(good)
        wanted = max(every + 1, round(each / _GOOD_SAVES_SHARE / max(case.step_seconds, 1e-9)))
        yield _finding(
            case, "slow_saves",
            f"Training waits {format_seconds(each)} for each save: {format_percent(100 * share)} of the run's time.",
            seconds=waited / elapsed * case.step_seconds, share=share,
            evidence=(f"{len(good)} saves, one each {every} steps", *_save_speed(good)),
            next=f"Set run.save_every = {wanted}, at which saves cost {format_percent(100 * _GOOD_SAVES_SHARE)}; or"
            " keep the run on a faster disk (weft doctor measures it).",
        )  # fmt: skip
    elif between > 0 and statistics.median(copied) > between:
        copy = statistics.median(copied)
        yield _finding(
            case, "slow_saves",
            f"A copy of a save to the disk takes {format_seconds(copy)}, and the next save comes after"
            f" {format_seconds(between)}: some never reach the disk.",
            evidence=_save_speed(good),
            next=f"Set run.save_every = {max(every + 1, round(1.5 * copy / max(case.step_seconds, 1e-9)))}, or keep the"
            " run on a faster disk.",
        )  # fmt: skip


def _interval_steps(saves: Sequence[Mapping[str, Any]]) -> int:
    steps = sorted({int(save["step"]) for save in saves})
    return round(statistics.median(np.diff(steps).tolist())) if len(steps) > 1 else steps[0]


def _save_speed(saves: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say how fast the last save went to the disk, where its files are still there."""
    for save in reversed(saves):
        folder, seconds = Path(str(save["path"])), float(save.get("copy_seconds") or save.get("seconds") or 0.0)
        if folder.is_dir() and seconds > 0:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            speed = f"{format_bytes(size / seconds)}/s" if size else "an unknown speed"
            return (f"{format_bytes(size)} of step {save['step']} at {speed}",)
    return ()


def growing_memory(case: RunCase) -> Iterator[RunVerdict]:
    """Yield ranks whose memory rises step for step, without an end."""
    window = case.record.window
    memory = window.column("memory")[window.num_steps == 1].astype(np.float64)
    if len(memory) < 2 * LEAST_STEPS:
        return
    memory = memory[len(memory) // 5 :]  # the first steps fill caches and pools
    rates = [_growth(memory[:, rank]) for rank in range(memory.shape[1])]
    grows = [rank for rank, rate in enumerate(rates) if rate > 0]
    if not grows:
        return
    worst = max(grows, key=lambda rank: rates[rank])
    rate, held = rates[worst], float(np.nanmax(memory[-1, grows]))
    left = "" if case.cluster is None else _steps_left(case.cluster.device_memory_bytes - held, rate)
    who = "Every rank's memory grows" if len(grows) == memory.shape[1] else f"The memory of rank {worst} grows"
    yield _finding(
        case, "growing_memory", f"{who} by {format_memory(rate)} per step, to {format_memory(held)} now{left}.",
        ranks=() if len(grows) == memory.shape[1] else tuple(grows),
        evidence=(f"it rose in every part of {len(memory)} steps",),
        next="Something keeps what steps make: look for lists that tensors are added to (losses without .item() or"
        " .detach()), caches without a limit, and hooks that are added in each step.",
    )  # fmt: skip


def _growth(memory: NDArray[np.float64]) -> float:
    """Return the bytes per step by which a rank's memory grows steadily; 0 where it does not."""
    memory = memory[np.isfinite(memory)]
    if len(memory) < LEAST_STEPS:
        return 0.0
    steps = np.arange(len(memory))
    slope, start = np.polyfit(steps, memory, 1)
    rise = slope * len(memory)
    if rise < max(_GROWTH_SHARE * float(memory.mean()), _GROWTH_BYTES):
        return 0.0
    fit = 1 - float(np.var(memory - slope * steps - start)) / max(float(np.var(memory)), 1e-9)
    thirds = [float(np.median(part)) for part in np.array_split(memory, 4)]
    # A pool that fills up rises less and less; what leaks rises as much at the end as at the begin.
    last = thirds[-1] - thirds[-2]
    return float(slope) if fit > 0.8 and last > 0.5 * (thirds[-1] - thirds[0]) / 3 else 0.0


def _steps_left(free_bytes: float, rate: float) -> str:
    return f"; {format_number(max(free_bytes, 0.0) / rate, 2)} steps fill the device" if rate > 0 else ""


def failures(case: RunCase) -> Iterator[RunVerdict]:
    """Yield what ended generations of the run: no memory, hangs, and other failures that came more than once."""
    ended = [event for event in case.record.events if event.get("kind") in ("generation", "failure")]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for event in ended:
        kinds.setdefault(_failure_kind(event), []).append(event)
    for kind, events in kinds.items():
        last = events[-1]
        where = f"rank {last.get('rank', 0)}" + (f" on {last['host']}" if last.get("host") else "")
        cause = str(last.get("cause") or last.get("text") or "").splitlines()[:1]
        if kind in ("host_memory", "device_memory"):
            yield _finding(
                case, "out_of_memory",
                f"{where[0].upper()}{where[1:]} had no memory left{_times(events)}.",
                ranks=(int(last.get("rank", 0)),), evidence=(*cause, *_held(case)), next=_less_memory(case, kind),
            )  # fmt: skip
        elif kind == "hang":
            yield _finding(
                case, "hang", f"The run hung at {where}{_times(events)}, in step {last.get('failed_step', '?')}.",
                ranks=(int(last.get("rank", 0)),), evidence=tuple(cause),
                next="weft watch RUN shows where each rank stood (its page of hangs). Where a collective of the loop is"
                " called on some ranks alone, call it on all; where input stalls, look at its storage.",
            )  # fmt: skip
        elif kind not in ("replan", "") and len(events) > 1:
            yield _finding(
                case, "failures", f"The run failed {len(events)} times ({kind.replace('_', ' ')}), last at {where}.",
                ranks=(int(last.get("rank", 0)),), evidence=tuple(cause),
                next="The log of that rank in the run's folder says more; [run.on_failure] says what may be restarted.",
            )  # fmt: skip
    yield from _stored_hangs(case, "hang" in kinds)


def _stored_hangs(case: RunCase, is_said: bool) -> Iterator[RunVerdict]:
    """Yield the last hang that was seen, unless its failure was reported, too, or the run went on by itself: on a busy
    machine a step may take as long."""
    last = case.record.steps[-1].step if case.record.steps else 0
    stored = case.record.stored_verdicts
    hangs = [verdict for verdict in stored if verdict.get("kind") == "hang" and verdict["step"] >= last]
    if hangs and not is_said:
        names = RunVerdict.__dataclass_fields__
        values = {name: value for name, value in hangs[-1].items() if name in names}
        ranks, evidence = tuple(values.pop("ranks", ())), tuple(values.pop("evidence", ()))
        yield RunVerdict(**values, ranks=ranks, evidence=evidence)
    elif (stall := case.record.stall) is not None:
        yield stall


def _failure_kind(event: Mapping[str, Any]) -> str:
    """Return the kind of a failure; of a rank's own error, by its class."""
    if event["kind"] == "generation":
        return str(event.get("failure", ""))
    error = str(event.get("error", ""))
    return {"OutOfMemoryError": "device_memory", "MemoryError": "host_memory"}.get(error, "")


def _times(events: Sequence[object]) -> str:
    return "" if len(events) == 1 else f", {len(events)} times"


def _held(case: RunCase) -> Iterator[str]:
    kinds: Mapping[str, float] = case.facts.ranks[0].get("memory", {}) if case.facts.ranks else {}
    if kinds:
        yield "held by kind: " + ", ".join(f"{name} {format_memory(size)}" for name, size in kinds.items())


def _less_memory(case: RunCase, kind: str) -> str:
    """Return the settings that lower memory, first those that cost least time."""
    plan = case.plan
    ways: list[str] = []
    if plan is not None:
        data = plan.mesh.replicate * plan.mesh.shard
        if smaller := plan.microbatch.smaller():
            ways.append(f"microbatch.size = {smaller.size} with as many more microbatches")
        if data > 1 and plan.data_parallel.zero < 2:
            ways.append(f"data_parallel.zero = {plan.data_parallel.zero + 1}")
        if plan.memory.recompute == "none":
            ways.append('memory.recompute = "selective"')
    ways = ways or ['memory.recompute = "full"', "more devices"]
    if kind == "host_memory":
        ways.append("fewer ranks on the host")
    return f"Change the plan, one after the other: {'; '.join(ways)}. weft plan RECIPE says what fits."


def unused_experts(case: RunCase) -> Iterator[RunVerdict]:
    """Yield routers that send most tokens to one expert."""
    reports = [report["load"] for report in case.record.reports[-50:] if report.get("load")]
    choices = int(getattr(case.recipe.model.shape, "top_k", 1)) if case.recipe is not None else 1
    for router in reports[-1] if reports else ():
        rows = [load[router] for load in reports if router in load and len(load[router]) > 1]
        if not rows or len(rows[-1]) != len(rows[0]):
            continue
        # Shares of the tokens, each of which makes several choices.
        load = choices * np.mean(np.array(rows, dtype=np.float64), axis=0)
        number, most = len(load), int(load.argmax())
        if number <= choices or load[most] < 0.5 * (1 + choices / number):
            continue
        yield _finding(
            case, "one_expert",
            f"Expert {most} of {router} gets {format_percent(100 * float(load[most]))} of the tokens, of {number}"
            " experts.",
            evidence=(f"mean of {len(rows)} reports",
                      f"{int((load < 0.1 * choices / number).sum())} experts get next to none"),
            next="Balance the choices: model.balance_loss_weight = 0.01, or balance_rate = 0.001, which changes no"
            " gradient.",
        )  # fmt: skip


def diverging_loss(case: RunCase) -> Iterator[RunVerdict]:
    """Yield a loss that rises again, that leaps, or that is not finite: the learning rate is too high for the batch."""
    rows = case.record.steps
    late = rows[len(rows) // 2 :]
    skipped = sum(row.skipped for row in late)
    if len(rows) >= _LEAST_LOSSES and skipped > 0.05 * sum(row.num_steps for row in late):
        yield _finding(
            case, "not_finite", f"{skipped} of the newest {sum(row.num_steps for row in late)} steps had no finite"
            " gradient and were skipped.", next=_lower_rate(case),
        )  # fmt: skip
        return
    losses = np.array([row.loss for row in rows if row.loss is not None], dtype=np.float64)
    losses = losses[np.isfinite(losses)]
    if len(losses) < _LEAST_LOSSES:
        return
    smooth = np.array([float(np.median(part)) for part in np.array_split(losses, 20)])
    noise = 1.4826 * float(np.median(np.abs(np.diff(losses)))) / np.sqrt(2)
    best = int(smooth.argmin())
    rise = float(smooth[-1] - smooth[best])
    if rise > max(5 * noise, 0.05 * abs(float(smooth[best]))) and best < len(smooth) - 2:
        yield _finding(
            case, "diverging",
            f"The loss rose from {format_number(float(smooth[best]))} to {format_number(float(smooth[-1]))} again.",
            evidence=(f"medians of {len(losses) // 20} steps; noise of a step {format_number(noise, 2)}",
                      *_rate_evidence(case)),
            next=_lower_rate(case),
        )  # fmt: skip


def _rate_evidence(case: RunCase) -> Iterator[str]:
    recipe = case.recipe
    if recipe is not None:
        scaled = recipe.optimizer.batch_scaling
        yield (
            f"learning_rate = {recipe.optimizer.learning_rate:g}, global_batch_size = {recipe.batch.global_batch_size},"
            f' batch_scaling = "{scaled}", {recipe.optimizer.schedule_line}'
        )


def _lower_rate(case: RunCase) -> str:
    recipe = case.recipe
    if recipe is None:
        return "Lower the learning rate, or let it rise over more steps (warm-up)."
    optimizer = recipe.optimizer
    if optimizer.batch_scaling == "linear" and optimizer.name != "sgd":
        return f'Set optimizer.batch_scaling = "square_root": {optimizer.name} does not bear the linear rule.'
    warm = max(20, recipe.run.steps // 20)
    more = f", and optimizer.warmup_steps = {warm}" if optimizer.warmup_steps < warm else ""
    return f"Set optimizer.learning_rate = {optimizer.learning_rate / 3:.2g}{more}."


def poor_convergence(case: RunCase) -> Iterator[RunVerdict]:
    """Yield that another run beside this one, with a smaller batch and the same learning rate, learns more from as many
    samples."""
    recipe = case.recipe
    if recipe is None or recipe.optimizer.batch_scaling != "none":
        return
    mine = _curve(case.record, recipe)
    if len(mine) < LEAST_STEPS:
        return
    for folder, other in _siblings(case, recipe):
        ratio = recipe.batch.global_batch_size / other.batch.global_batch_size
        curve = _curve(RunRecord(folder), other)
        if ratio < 2 or len(curve) < LEAST_STEPS:
            continue
        reached = float(np.median(mine[-5:, 1]))
        below = curve[_smoothed(curve[:, 1]) <= reached, 0]
        if not len(below) or mine[-1, 0] < 2 * below[0]:
            continue
        power = 1.0 if recipe.optimizer.name in ("sgd", "lars") else 0.5
        rule = "linear" if power == 1.0 else "square_root"
        rate = recipe.optimizer.learning_rate * ratio**power
        yield _finding(
            case, "unscaled_rate",
            f"A loss of {format_number(reached)} took {mine[-1, 0]:,.0f} samples, and {below[0]:,.0f} in {folder.name},"
            f" whose batch is {format_number(ratio)} times smaller: the learning rate was not raised with the batch.",
            evidence=tuple(_rate_evidence(case)),
            next=f'Set optimizer.batch_scaling = "{rule}" and base_batch_size = {other.batch.global_batch_size} (a'
            f" learning rate of {rate:.2g}), with a warm-up.",
        )  # fmt: skip
        return


def _siblings(case: RunCase, recipe: Recipe) -> Iterator[tuple[Path, Recipe]]:
    """Yield runs beside this one that train the same model on the same data with a smaller batch."""
    own = case.record.folder.path.absolute()
    folders = sorted((path for path in own.parent.iterdir() if path.is_dir() and path != own), reverse=True)
    found = 0
    for folder in folders:
        try:
            other = parse_recipe((folder / "recipe.toml").read_text())
        except (OSError, ValueError, WeftError):  # a folder beside the run's may hold anything
            continue
        same = other.model == recipe.model and other.data == recipe.data
        rates = other.optimizer.learning_rate, recipe.optimizer.learning_rate
        if not same or other.optimizer.name != recipe.optimizer.name or abs(rates[0] / rates[1] - 1) > 0.1:
            continue
        if other.optimizer.batch_scaling == "none" and other.batch.global_batch_size < recipe.batch.global_batch_size:
            yield folder, other
            found += 1
        if found == _MOST_SIBLINGS:
            return


def _curve(record: RunRecord, recipe: Recipe) -> NDArray[np.float64]:
    """Return samples seen and loss, row by row."""
    size = recipe.batch.global_batch_size
    rows = [(row.step * size, row.loss) for row in record.steps if row.loss is not None and np.isfinite(row.loss)]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _smoothed(losses: NDArray[np.float64], width: int = 5) -> NDArray[np.float64]:
    padded = np.pad(losses, (width - 1, 0), mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def _finding(
    case: RunCase, kind: str, title: str, *, seconds: float = 0.0, share: float = 0.0, ranks: tuple[int, ...] = (),
    evidence: Sequence[str] = (), next: str = "",
) -> RunVerdict:  # fmt: skip
    number = len(case.record.steps)
    return RunVerdict(kind=kind, title=title, seconds=seconds, share=share, confidence="high", num_steps=number,
                      ranks=ranks, evidence=tuple(evidence), next=next)  # fmt: skip
