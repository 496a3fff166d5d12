"""The first page: what holds the run back, and how it goes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from weft.events import format_duration, format_loss
from weft.formatting import format_memory, format_number, format_percent, format_seconds
from weft.watch.accounting import own_times, phase_names, phase_title
from weft.watch.run_record import RunRecord
from weft.watch.store import StepWindow
from weft.watch.verdicts import RunVerdict, frontier_line, peers_of
from weft.watch.views._blocks import (
    UNKNOWN,
    Block,
    bars,
    block,
    figure,
    index,
    lines,
    note,
    number,
    plural,
    seconds,
    signed_percent,
    table,
    text,
    time_scale,
)
from weft.watch.views._common import (
    hang_block,
    host_of,
    median,
    not_recorded,
    place_of,
    recent,
    span_of_steps,
    step_marks,
)
from weft.watch.views._events import events_strip


def overview(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page."""
    blocks: list[Block | None] = [hang_block(record), verdict_block(record.verdicts), _figures(record)]
    if not record.steps:
        return [*(known for known in blocks[:1] if known), not_recorded(record)]
    blocks += [_step_time(record), _frontier(record), _suspects(record), *_loss(record)]
    blocks += [events_strip(record), _health(record)]
    if not record.is_recorded:
        blocks[1] = not_recorded(record)
    return [known for known in blocks if known]


def verdict_block(verdicts: list[RunVerdict]) -> Block:
    """Return what holds the run back, each with its evidence and what to try next."""
    first = verdicts[0]
    rows = [
        {
            "title": verdict.title,
            "kind": verdict.kind,
            "confidence": verdict.confidence,
            "cost": f"{format_seconds(verdict.seconds)} per step, {format_percent(100 * verdict.share)} of it"
            if verdict.seconds
            else "",
            "evidence": list(verdict.evidence),
            "next": verdict.next,
            "ranks": list(verdict.ranks[:8]),
        }
        for verdict in verdicts[:4]
    ]
    shown = table(
        [
            text("finding", [verdict.title for verdict in verdicts]),
            seconds("cost per step", [verdict.seconds for verdict in verdicts]),
            text("confidence", [verdict.confidence for verdict in verdicts]),
            text("next", [verdict.next for verdict in verdicts]),
        ]
    )
    says = f"Judged by {plural(first.num_steps, 'recorded step')}."
    return block("verdicts", "What holds it back", says, shown, verdicts=rows)


def _figures(record: RunRecord) -> Block | None:
    if not record.steps:
        return None
    newest, facts = record.steps[-1], record.facts
    walls = np.array([row.seconds for row in record.steps[-RECENT:] if row.step > 1] or [newest.seconds])
    usual, late = float(np.median(walls)), float(np.quantile(walls, 0.95))
    planned = sum(float(value) for value in facts.predicted.get("seconds", {}).values())
    about = f"95 % of steps below {format_seconds(late)}"
    if planned:
        about += f"; plan {format_seconds(planned)} ({signed_percent(usual / planned - 1)})"
    ranks = f", {plural(record.num_ranks, 'rank')}" if record.num_ranks else ""
    shown = [
        figure("step", f"{newest.step:,}", f"generation {max(facts.number, 1)}{ranks}"),
        figure("step time", format_seconds(usual), about),
        _rate(record, usual),
        figure("loss", UNKNOWN if newest.loss is None else format_loss(newest.loss), _gradient(newest.gradient_norm)),
    ]
    memory = _memory(record)
    shown += [figure("memory", memory, "rank that holds most")] if memory else []
    if record.state == "running":
        now = f"newest step ended {format_duration(record.silent_seconds)} ago"
    else:
        now = {"ended": "the run has ended", "lost": "its process is gone without a word"}.get(
            record.state, "not running"
        )
    rows = [[entry["name"], entry["value"], entry["about"]] for entry in shown]
    twin = table([text("figure", [row[0] for row in rows]), text("value", [row[1] for row in rows]),
                  text("more", [row[2] for row in rows])])  # fmt: skip
    return block(
        "figures", "Now", f"Medians of the newest {plural(len(walls), 'record')} of steps; {now}.", twin, figures=shown
    )


def _gradient(norm: float | None) -> str:
    return "" if norm is None else f"gradient norm {format_loss(norm)}"


def _rate(record: RunRecord, usual: float) -> dict[str, str]:
    facts = record.facts
    peak = facts.model_flops / usual / facts.peak_flops if facts.peak_flops and usual > 0 else None
    report = record.reports[-1] if record.reports else {}
    peak = peak if peak is not None else report.get("peak_share")
    about = f"{format_percent(100 * peak)} of the measured peak" if peak else "share of the peak unknown"
    if facts.tokens_per_sample and usual > 0:
        rate = facts.samples_per_step * facts.tokens_per_sample / usual
        return figure("tokens/s", format_number(rate), about)
    samples = facts.samples_per_step / usual if facts.samples_per_step and usual > 0 else None
    tokens, samples = report.get("tokens_per_second"), samples or report.get("samples_per_second")
    if tokens:
        return figure("tokens/s", format_number(tokens), about)
    return figure("samples/s", format_number(samples) if samples else UNKNOWN, about)


def _memory(record: RunRecord) -> str:
    if record.is_recorded and "memory" in record.window.columns:
        most = record.window.column("memory")[-1]
        return format_memory(float(np.nanmax(most))) if np.isfinite(most).any() else ""
    report = record.reports[-1] if record.reports else {}
    return format_memory(report["memory_bytes"]) if report.get("memory_bytes") else ""


def _step_time(record: RunRecord) -> Block:
    rows = record.steps[-500:]
    if len(rows) > 5 and rows[0].step == 1:
        rows = rows[1:]  # the step that warms up would flatten all others
    unit, scale = time_scale([float(np.quantile([row.seconds for row in rows], 0.9))])
    planned = sum(float(value) for value in record.facts.predicted.get("seconds", {}).values())
    usual = float(np.median([row.seconds for row in rows[-RECENT:]]))
    says = f"Wall time of each step on the rank that took longest: {format_seconds(usual)} in the median now"
    says += f", against {format_seconds(planned)} in the plan." if planned else "; no plan's prediction is known."
    return lines(
        "Step time", says, [row.step for row in rows], {"step time": [row.seconds * scale for row in rows]}, unit=unit,
        level=("plan", planned * scale) if planned else None, marks=step_marks(record),
    )  # fmt: skip


RECENT = 50
"""Newest steps whose median is the usual step."""
_SILENT_SECONDS = 10.0
"""Silence of the recorder above which the page says so; it writes twice a second."""


def _frontier(record: RunRecord) -> Block | None:
    if not record.is_recorded:
        return None
    window = recent(record.window)
    line = frontier_line(window)
    unit, scale = time_scale([sum(value for _, value in line)])
    longest = max(line, key=lambda item: item[1])
    total = sum(value for _, value in line)
    says = (
        f"Seconds that each phase adds to the step of the whole job, mean of {span_of_steps(window)}: they sum to the"
        f" step, {format_seconds(total)}. Most is {phase_title(longest[0])},"
        f" {format_percent(100 * longest[1] / total if total else 0)}."
    )
    parts = {phase_title(name): [value * scale] for name, value in line}
    return bars("Where the step goes", says, "job", ["step"], parts, unit=unit)


def suspects_of(window: StepWindow, record: RunRecord, most: int = 5) -> list[tuple[int, str, float, float]]:
    """Return (rank, phase, own seconds, seconds of its peers), the largest excess first."""
    phases = [name for name in phase_names(window.columns) if name not in ("checkpoint", "evaluation")]
    own = median(own_times(window, phases), axis=0)  # ranks × phases
    found: list[tuple[int, str, float, float]] = []
    for peers in peers_of(record.facts, own.shape[0]):
        if len(peers) < 2:
            continue
        usual = median(own[peers], axis=0)
        excess = np.nan_to_num(own[peers] - usual[None, :], nan=-np.inf)
        for place in np.argsort(-excess.max(axis=1))[:most]:
            phase = int(excess[place].argmax())
            found.append((peers[int(place)], phases[phase], float(own[peers[int(place)], phase]), float(usual[phase])))
    return sorted(found, key=lambda entry: entry[3] - entry[2])[:most]


def _suspects(record: RunRecord) -> Block | None:
    if not record.is_recorded or record.num_ranks < 2:
        return None
    window = recent(record.window)
    suspects = suspects_of(window, record)
    if not suspects:
        return note(
            "Slowest ranks", "Every rank has a pipeline stage of its own, so none has peers to compare it with."
        )
    rank, phase, own, usual = suspects[0]
    share = (own - usual) / max(record.usual_seconds, 1e-9)
    says = "Own time, without waits for others, against the median of ranks with equally much to do: "
    says += f"rank {rank} differs most"
    says += f", by {format_seconds(own - usual)} in {phase_title(phase)}" + (
        "." if share > 0.05 else ", which is within what steps differ by."
    )
    facts = record.facts
    columns = [
        index("rank", [entry[0] for entry in suspects]),
        text("host", [host_of(facts, entry[0]) for entry in suspects]),
        text("place", [place_of(facts, entry[0]) for entry in suspects]),
        text("phase", [phase_title(entry[1]) for entry in suspects]),
        seconds("own time", [entry[2] for entry in suspects]),
        seconds("its peers", [entry[3] for entry in suspects]),
        seconds("more", [entry[2] - entry[3] for entry in suspects]),
    ]
    return block("table", "Slowest ranks", says, table(columns))


def _loss(record: RunRecord) -> list[Block]:
    rows = [row for row in record.steps if row.loss is not None]
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    says = f"Loss of the global batch: {format_loss(first.loss or 0)} at step {first.step:,}, "
    says += f"{format_loss(last.loss or 0)} at step {last.step:,}."
    x = [row.step for row in rows]
    return [
        lines("Loss", says, x, {"loss": [row.loss for row in rows]}, marks=step_marks(record)),
        lines(
            "Gradient norm", "Norm of the whole gradient before clipping; where it jumps, the loss often does so next.",
            x, {"gradient norm": [row.gradient_norm for row in rows]}, marks=step_marks(record),
        ),
    ]  # fmt: skip


def _health(record: RunRecord) -> Block | None:
    if not record.is_recorded and not record.problem:
        return None
    window, gaps = record.window, record.gaps
    missing = int(np.isnan(window.column("wall")).any(axis=0).sum()) if record.is_recorded else 0
    spans, steps = sum(gap.spans + gap.collectives for gap in gaps), sum(gap.steps for gap in gaps)
    silent = time.time() - record.seen_at if record.seen_at and record.state == "running" else 0.0
    if record.problem:
        says = record.problem
    elif silent > _SILENT_SECONDS:
        says = f"The recorder has said nothing for {format_duration(silent)}: what is shown is as old as that."
    elif gaps or missing:
        says = f"Something is missing: {plural(len(gaps), 'gap')}, in which {plural(steps, 'step')} and"
        says += f" {plural(spans, 'span')} are known to be lost"
        says += f", and {plural(missing, 'rank')} left out steps of the newest {len(window.steps)}." if missing else "."
    else:
        says = f"Nothing is missing: every rank recorded each of the newest {len(window.steps)} steps."
    if (error := record.facts.clock_error_seconds) is not None:
        says += f" Clocks of the other hosts were compared with the collector's, to ± {format_seconds(error)}."
    newest = list(gaps[-8:])
    columns = [
        number("behind step", [gap.step for gap in newest]),
        text("rank", ["all" if gap.rank < 0 else gap.rank for gap in newest]),
        number("steps", [gap.steps for gap in newest]),
        number("spans", [gap.spans for gap in newest]),
        number("collectives", [gap.collectives for gap in newest]),
        text("why", [gap.reason for gap in newest]),
    ]
    return block("table", "Recording", says, table(columns)) if newest else note("Recording", says)
