"""What the plan said beside what was measured: time by term, memory by kind and stage, runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.events import format_loss
from weft.formatting import format_memory, format_percent, format_seconds
from weft.watch.accounting import ACTIONS, TERM_OF_AXIS, axis_names, own_times, phase_names
from weft.watch.run_record import RunRecord
from weft.watch.store import StepWindow
from weft.watch.verdicts import stages_of
from weft.watch.views._blocks import (
    Block,
    bars,
    block,
    lines,
    memory,
    memory_scale,
    note,
    number,
    plural,
    rounded,
    seconds,
    signed_percent,
    table,
    text,
    time_scale,
)
from weft.watch.views._common import mean, not_recorded, recent, span_of_steps

_COMPUTING = ("ideal", "matrix_shapes", "memory_bound", "recompute")
"""Terms of the prediction that are time in forwards and backwards."""
_TERM_TITLES: Mapping[str, str] = {
    "computing": "forward and backward",
    "tensor": "tensor communication",
    "context": "context communication",
    "expert": "expert communication",
    "pipeline": "sends of the pipeline",
    "bubble": "pipeline bubble",
    "data": "gradients and parameters",
    "optimizer": "optimizer",
    "other": "everything else",
}
_KIND_TITLES: Mapping[str, str] = {"weights": "parameters", "buckets": "communication buffers"}


class TermError(NamedTuple):
    """One term of the step: what the plan said and what was measured, in seconds."""

    term: str
    title: str
    planned: float | None
    measured: float

    @property
    def excess(self) -> float | None:
        return None if self.planned is None else self.measured - self.planned


def plan_terms(record: RunRecord) -> list[TermError]:
    """Return every term of the step, the one that is farthest from the plan first.

    Measured terms are means over ranks and the newest steps, and sum to the mean step.
    """
    window = recent(record.window)
    measured = _measured(window)
    predicted: Mapping[str, float] = record.facts.predicted.get("seconds", {})
    planned = dict.fromkeys(_TERM_TITLES, 0.0)
    for term, value in predicted.items():
        name = "computing" if term in _COMPUTING else term
        planned[name if name in planned else "other"] += float(value)
    terms = [
        TermError(name, title, planned[name] if predicted else None, measured.get(name, 0.0))
        for name, title in _TERM_TITLES.items()
        if planned[name] or measured.get(name, 0.0)
    ]
    return sorted(terms, key=lambda term: -abs(term.measured if term.excess is None else term.excess))


def _measured(window: StepWindow) -> dict[str, float]:
    """Return the mean seconds per step of each term."""
    phases = list(phase_names(window.columns))
    own = dict(zip(phases, mean(mean(own_times(window, phases), axis=0), axis=0).tolist(), strict=True))
    found: dict[str, float] = {"computing": sum(own.get(name, 0.0) for name in (*ACTIONS, "forward_backward"))}
    found["optimizer"] = own.get("optimizer", 0.0) + own.get("reduce_wait", 0.0)
    bubble = float(mean(window.column("bubble")))
    for axis in axis_names(window.columns):
        term = TERM_OF_AXIS.get(axis, "other")
        found[term] = found.get(term, 0.0) + float(mean(window.column(f"exposed:{axis}")))
    # Waits for other stages are communication of the pipeline's axis, or of the agreement behind its last backwards.
    for term in ("pipeline", "other"):
        inside = min(bubble - found.get("bubble", 0.0), found.get(term, 0.0))
        found[term] = found.get(term, 0.0) - inside
        found["bubble"] = found.get("bubble", 0.0) + inside
    found["other"] = float(mean(window.column("wall"))) - sum(value for term, value in found.items() if term != "other")
    return found


def plan(record: RunRecord, options: Mapping[str, str], others: Sequence[RunRecord] = ()) -> list[Block]:
    """Return the blocks of the page; `others` are the runs that stand beside this one."""
    shown: list[Block] = [_side_by_side([record, *others])] if others else []
    if record.is_recorded:
        shown += _terms(record)
    else:
        shown.append(not_recorded(record))
    if record.plan or record.facts.plan:
        digest = f" Its digest is {record.facts.plan_digest}." if record.facts.plan_digest else ""
        shown.append(block("texts", "The plan", f"How the job is split.{digest}",
                           texts=[{"title": "plan.toml", "text": record.facts.plan or record.plan}]))  # fmt: skip
    return shown


def _terms(record: RunRecord) -> list[Block]:
    terms = plan_terms(record)
    measured = sum(term.measured for term in terms)
    unit, scale = time_scale([max((max(term.measured, term.planned or 0.0) for term in terms), default=0.0)])
    steps = span_of_steps(recent(record.window))
    if terms[0].planned is None:
        says = (
            f"Mean step of {steps}: {format_seconds(measured)}. What the plan predicts for this machine is not known."
        )
    else:
        planned = sum(term.planned or 0.0 for term in terms)
        first = terms[0]
        says = (
            f"Mean step of {steps}: {format_seconds(measured)}, the plan said {format_seconds(planned)}"
            f" ({signed_percent(measured / planned - 1)}). Farthest from it is {first.title}:"
            f" {format_seconds(first.measured)} instead of {format_seconds(first.planned or 0.0)}."
        )
        spread = record.facts.predicted.get("spread")
        says += f" The planner's own spread is ±{format_percent(100 * float(spread))}." if spread else ""
        says += str(record.facts.predicted.get("learned", ""))
    drawn = bars("Plan and measurement, by term", says, "term", [term.title for term in terms],
                 {"measured": [term.measured * scale for term in terms]}, unit=unit, total="")  # fmt: skip
    drawn["against"] = [None if term.planned is None else rounded(term.planned * scale) for term in terms]
    drawn["table"] = table(
        [
            text("term", [term.title for term in terms] + ["step"]),
            seconds("plan", [term.planned for term in terms] + [_total([term.planned for term in terms])]),
            seconds("measured", [term.measured for term in terms] + [measured]),
            seconds("more", [term.excess for term in terms] + [_total([term.excess for term in terms])]),
            number("error", [_error(term.planned, term.measured) for term in terms]
                   + [_error(_total([term.planned for term in terms]), measured)], digits=2, unit="%"),
        ]
    )  # fmt: skip
    return [drawn | {"is_open": True}]


def _total(values: Sequence[float | None]) -> float | None:
    return None if any(value is None for value in values) else sum(value or 0.0 for value in values)


def _error(planned: float | None, measured: float) -> float | None:
    return 100 * (measured / planned - 1) if planned else None


def _side_by_side(records: Sequence[RunRecord]) -> Block:
    """Return what can be compared of several runs, and where their plans differ."""
    usual = [record.usual_seconds or None for record in records]
    base = usual[0]
    columns = [
        text("run", [record.name for record in records]),
        text("plan", [record.facts.plan_digest for record in records]),
        text("axes", [" × ".join(f"{axis} {size}" for axis, size in record.facts.axes.items()) for record in records]),
        number("ranks", [record.num_ranks or None for record in records]),
        seconds("step time", usual),
        number("against the first", [_error(base, each) if each else None for each in usual], digits=2, unit="%"),
        number("step", [record.steps[-1].step if record.steps else None for record in records]),
        text("loss", [format_loss(record.steps[-1].loss) if record.steps and record.steps[-1].loss is not None else None
                      for record in records]),
        memory("memory", [_most_memory(record) for record in records]),
    ]  # fmt: skip
    parts = [_measured(recent(record.window)) if record.is_recorded else {} for record in records]
    unit, scale = time_scale([each or 0.0 for each in usual])
    fastest = min(
        (record for record in records if record.usual_seconds), key=lambda record: record.usual_seconds, default=None
    )
    says = f"{plural(len(records), 'run')} by the mean time of each term of a step."
    says += f" {fastest.name} has the shortest step, {format_seconds(fastest.usual_seconds)}." if fastest else ""
    stacks = {
        title: [part[term] * scale if term in part else None for part in parts]
        for term, title in _TERM_TITLES.items()
        if any(part.get(term) for part in parts)
    }
    drawn = bars("Runs side by side", says, "run", [record.name for record in records], stacks, unit=unit)
    return drawn | {"table": table(columns)}


def _most_memory(record: RunRecord) -> float | None:
    values = record.window.column("memory")[-1:] if "memory" in record.window.columns else np.zeros(0)
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def memory_page(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page: bytes by kind and stage, beside the plan, and over steps."""
    if not record.is_recorded or "memory" not in record.window.columns:
        return (
            [not_recorded(record)] if not record.is_recorded else [note("Memory", "Ranks did not record their memory.")]
        )
    window, facts = record.window, record.facts
    now = window.column("memory")[-1]
    stages = stages_of(facts) or [list(range(len(now)))]
    fullest = [members[int(np.nanargmax(np.nan_to_num(now[members], nan=-1.0)))] for members in stages]
    kinds = list(
        dict.fromkeys(
            kind for rank in fullest if rank < len(facts.ranks) for kind in facts.ranks[rank].get("memory", {})
        )
    )
    unit, scale = memory_scale([float(np.nanmax(now))])
    known = {kind: [float(facts.ranks[rank].get("memory", {}).get(kind, 0.0)) for rank in fullest] for kind in kinds}
    held = [sum(values[at] for values in known.values()) for at in range(len(fullest))]
    rest = [max(float(now[rank]) - of_kinds, 0.0) for rank, of_kinds in zip(fullest, held, strict=True)]
    parts = {kind: [value * scale for value in values] for kind, values in known.items()}
    parts["activations, process and the rest"] = [value * scale for value in rest]
    names = [f"stage {at}, rank {rank}" if len(stages) > 1 else f"rank {rank}" for at, rank in enumerate(fullest)]
    planned = facts.predicted.get("memory", ())
    limits = [
        sum(float(value) for value in planned[at].values()) if at < len(planned) else None for at in range(len(stages))
    ]
    worst = int(np.nanargmax(np.nan_to_num(now, nan=-1.0)))
    says = f"Rank {worst} holds most, {format_memory(float(now[worst]))}."
    usable = float(facts.predicted.get("usable_bytes") or 0.0)
    says += f" A rank may fill {format_memory(usable)}." if usable else ""
    says += " The line in a bar is the plan." if any(limits) else " What the plan predicts is not known."
    drawn = bars("Memory by kind, fullest rank of each stage", says, "where", names, parts, unit=unit)
    drawn["against"] = [None if limit is None else rounded(limit * scale) for limit in limits]
    drawn["table"] = table(
        [
            text("where", names),
            *(memory(kind, values) for kind, values in known.items()),
            memory("activations, process and the rest", rest),
            memory("all", [float(now[rank]) for rank in fullest]),
            memory("plan", limits),
            number("against the plan", [_error(limit, float(now[rank]))
                                        for limit, rank in zip(limits, fullest, strict=True)], digits=2, unit="%"),
        ]
    )  # fmt: skip
    over = window.column("memory")
    series = {
        "rank that holds most": (np.nan_to_num(np.nanmax(over, axis=1), nan=0.0) * scale).tolist(),
        "mean of ranks": (mean(over, axis=1) * scale).tolist(),
    }
    grown = series["mean of ranks"][-1] - series["mean of ranks"][0]
    told = (
        f"Bytes that ranks hold at the end of each of {span_of_steps(window)}: the mean changed by {grown:+.3g} {unit}."
    )
    shown = [drawn, lines("Memory over steps", told, window.steps.tolist(), series, unit=unit)]
    if planned:
        shown.append(_planned_memory(planned, unit, scale))
    return shown


def _planned_memory(planned: Sequence[Mapping[str, float]], unit: str, scale: float) -> Block:
    kinds = list(dict.fromkeys(kind for stage in planned for kind in stage))
    parts = {_KIND_TITLES.get(kind, kind): [float(stage.get(kind, 0.0)) * scale for stage in planned] for kind in kinds}
    says = "What the plan predicts at the peak of a step, by kind."
    return bars("Memory in the plan", says, "stage", [str(stage) for stage in range(len(planned))], parts, unit=unit)
