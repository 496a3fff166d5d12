"""Ranks beside one another: a heat map over steps, the split of one rank, and the map of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.formatting import format_percent, format_seconds
from weft.watch.accounting import STATES, TERM_OF_AXIS, axis_names, own_times, phase_names, phase_title
from weft.watch.run_record import RunRecord
from weft.watch.store import GenerationFacts, StepWindow
from weft.watch.verdicts import peers_of
from weft.watch.views._blocks import (
    Block,
    bars,
    block,
    choice,
    chosen,
    controls,
    index,
    memory_scale,
    number,
    plural,
    rounded,
    seconds,
    table,
    text,
    time_scale,
)
from weft.watch.views._common import (
    STATE_TITLES,
    coordinates_of,
    groups_of,
    host_of,
    mean,
    median,
    not_recorded,
    part,
    place_of,
    recent,
    span_of_steps,
)
from weft.watch.views._profile import profile_block

MOST_ROWS = 512
"""Rows of a heat map; of more ranks, neighbours share one, which shows the largest."""
_MOST_STEPS = 240
_MOST_BARS = 32


def ranks(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page.  Options: `metric`, `order`, `rank`."""
    if not record.is_recorded:
        return [not_recorded(record)]
    window, facts = record.window, record.facts
    metrics = _metrics(window)
    metric = chosen(options, "metric", metrics, "own")
    orders = {"rank": "rank", **{axis: axis for axis in facts.axes}, "host": "host"}
    order = chosen(options, "order", orders, "rank")
    shown = [controls(choice("metric", "show", list(metrics.items()), metric),
                      choice("order", "ordered by", list(orders.items()), order))]  # fmt: skip
    shown.append(_heat(record, part(window, slice(-_MOST_STEPS, None)), metric, metrics[metric], order))
    rank = chosen(options, "rank", map(str, range(window.values.shape[1])), "")
    if rank:
        shown.append(_one_rank(record, int(rank)))
    profiled = profile_block(record)
    return [*shown, *([] if profiled is None else [profiled]), _split(record, order)]


def _metrics(window: StepWindow) -> dict[str, str]:
    """Return what the heat map can show: column, or `own` and `own:<phase>`, and its title."""
    phases = phase_names(window.columns)
    titles = {"own": "own time (without waits)", "wall": "step time"}
    titles |= {name: STATE_TITLES[name] for name in STATES if name in window.columns}
    titles |= {"descheduled": "without a processor", "memory": "memory"}
    titles |= {f"own:{name}": f"own time in {phase_title(name)}" for name in phases}
    return titles | {f"exposed:{axis}": f"waiting along {axis}" for axis in axis_names(window.columns)}


def _values(window: StepWindow, metric: str) -> NDArray[Any]:
    """Return a metric: shape (steps, ranks)."""
    if metric == "own":
        return own_times(window, phase_names(window.columns)).sum(axis=2)
    if metric.startswith("own:"):
        return own_times(window, [metric.removeprefix("own:")])[:, :, 0]
    return window.column(metric)


def ordered_ranks(facts: GenerationFacts, num_ranks: int, order: str) -> list[int]:
    """Return ranks by number, by host, or by their place on an axis."""
    everyone = range(num_ranks)
    if order == "host":
        return sorted(everyone, key=lambda rank: (host_of(facts, rank), rank))
    return sorted(everyone, key=lambda rank: (coordinates_of(facts, rank).get(order, 0), rank))


def _heat(record: RunRecord, window: StepWindow, metric: str, title: str, order: str) -> Block:
    facts, num_ranks = record.facts, int(window.values.shape[1])
    places = ordered_ranks(facts, num_ranks, order)
    values = _values(window, metric).T[places]  # rows × steps
    size = -(-num_ranks // MOST_ROWS)
    groups = [places[at : at + size] for at in range(0, num_ranks, size)]
    if size > 1:
        filled = np.where(np.isfinite(values), values, -np.inf)
        filled = np.maximum.reduceat(filled, np.arange(0, num_ranks, size), axis=0)
        values = np.where(np.isfinite(filled), filled, np.nan)
    low, high = _bounds(values)
    unit, scale = memory_scale([high]) if metric == "memory" else time_scale([high])
    values, low, high = values * scale, low * scale, high * scale
    names = [str(group[0]) if len(group) == 1 else f"{group[0]}…{group[-1]}" for group in groups]
    about = [_about(facts, group, order) for group in groups]
    usual = median(values[:, -50:], axis=1)
    most = np.nanargmax(usual) if np.isfinite(usual).any() else 0
    says = (
        f"{title[0].upper()}{title[1:]} of {plural(num_ranks, 'rank')} in {span_of_steps(window)}: a row is"
        f" {'a rank' if size == 1 else f'the largest of {size} ranks'}, a column a step. Highest in the median is"
        f" rank {names[most]} ({usual[most]:.3g} {unit}), the median of all is {float(median(usual)):.3g} {unit}."
    )
    top = np.argsort(-np.nan_to_num(usual, nan=-np.inf), kind="stable")[:64]
    shown = table(
        [
            text("rank", [names[row] for row in top]),
            text("where", [about[row] for row in top]),
            number("median", [float(usual[row]) for row in top], unit=unit),
            number("newest", [float(values[row, -1]) for row in top], unit=unit),
            number("most", [_largest(values[row]) for row in top], unit=unit),
        ]
    )
    return block(
        "heat", "Ranks over steps", says, shown, x=window.steps.tolist(), rows=names, about=about, unit=unit,
        low=low, high=high, firsts=[group[0] for group in groups], cuts=_cuts(facts, groups, order),
        values=[[rounded(value) for value in row] for row in np.round(values, 4).tolist()],
    )  # fmt: skip


def _about(facts: GenerationFacts, group: Sequence[int], order: str) -> str:
    where = [host_of(facts, group[0]), place_of(facts, group[0])]
    return ", ".join(known for known in where if known)


def _cuts(facts: GenerationFacts, groups: Sequence[Sequence[int]], order: str) -> list[int]:
    """Return rows before which another host, or another place on the axis, begins."""
    if order == "rank":
        return []
    keys = [
        host_of(facts, group[0]) if order == "host" else coordinates_of(facts, group[0]).get(order, 0)
        for group in groups
    ]
    return [row for row in range(1, len(keys)) if keys[row] != keys[row - 1]]


def _largest(values: NDArray[Any]) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else 0.0


def _bounds(values: NDArray[Any]) -> tuple[float, float]:
    """Return what the ends of the colours stand for.

    One long step hides nothing, as the highest percent of all cells is cut off; a row that is always high is not cut.
    Noise does not fill the colours: their range is a tenth of the median at least.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, middle, high = (float(value) for value in np.quantile(known, [0.01, 0.5, 0.99]))
    high = max(high, float(np.nanmax(median(values, axis=1))), low + 0.1 * abs(middle))
    return low, high if high > low else low + 1e-9


def _one_rank(record: RunRecord, rank: int) -> Block:
    """Return the phases of one rank beside those of its peers."""
    window = recent(record.window)
    phases = list(phase_names(window.columns))
    own, waits = own_times(window, phases), np.stack([window.column(f"waits:{name}") for name in phases], axis=2)
    peers = next((group for group in peers_of(record.facts, own.shape[1]) if rank in group), [rank])
    others = [peer for peer in peers if peer != rank]
    mine = median(own[:, rank], axis=0)
    theirs = median(median(own[:, others], axis=0), axis=0) if others else np.full(len(phases), np.nan)
    unit, scale = time_scale([float(np.nanmax(mine, initial=0.0))])
    titles = [phase_title(name) for name in phases]
    where = ", ".join(known for known in (host_of(record.facts, rank), place_of(record.facts, rank)) if known)
    device = str(record.facts.ranks[rank].get("device", "")) if rank < len(record.facts.ranks) else ""
    says = f"Rank {rank}{f' ({where})' if where else ''}{f' on {device}' if device else ''}: "
    says += f"medians of {span_of_steps(window)}"
    says += (
        f", beside the median of {plural(len(others), 'rank')} with equally much to do."
        if others
        else "; it has no peers."
    )
    made = bars(
        f"Rank {rank} by phase", says, "phase", titles, {"own time": (mine * scale).tolist()}, unit=unit, total=""
    )
    made["table"] = table(
        [
            text("phase", titles),
            seconds("own time", mine.tolist()),
            seconds("its peers", theirs.tolist()),
            seconds("more", (mine - theirs).tolist()),
            seconds("waits for others", median(waits[:, rank], axis=0).tolist()),
        ]
    )
    return made | {"against": [rounded(value * scale) for value in theirs.tolist()]}


def _split(record: RunRecord, order: str) -> Block:
    """Return the states of every rank, or of every group of ranks where there are many."""
    window, facts = recent(record.window), record.facts
    num_ranks = int(window.values.shape[1])
    states = [name for name in STATES if name in window.columns]
    values = np.stack([mean(window.column(name), axis=0) for name in states], axis=1)  # ranks × states
    places = ordered_ranks(facts, num_ranks, order)
    size = -(-num_ranks // _MOST_BARS)
    groups = [places[at : at + size] for at in range(0, num_ranks, size)]
    grouped = np.stack([mean(values[group], axis=0) for group in groups])
    wall = float(mean(window.column("wall")))
    unit, scale = time_scale([wall])
    rest = abs(float(mean(window.column("wall") - sum(window.column(name) for name in states))))
    names = [str(group[0]) if len(group) == 1 else f"{group[0]}…{group[-1]}" for group in groups]
    says = (
        f"What ranks did in a step of {format_seconds(wall)}, mean of {span_of_steps(window)}: computing"
        f" {format_percent(100 * float(mean(values[:, 0])) / wall if wall else 0)} of it."
        f" {'All' if rest < 1e-4 * wall else format_percent(100 - 100 * rest / wall)} of the step is accounted for."
    )
    parts = {STATE_TITLES[name]: (grouped[:, at] * scale).tolist() for at, name in enumerate(states)}
    return bars("States of each rank", says, "rank", names, parts, unit=unit,
                links=[{"rank": str(group[0])} for group in groups])  # fmt: skip


def mesh(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page: hosts, their ranks by place in the mesh, and the axes between them."""
    facts = record.facts
    if not facts.ranks:
        return [not_recorded(record)]
    window = recent(record.window)
    num_ranks = len(facts.ranks)
    own = median(own_times(window, phase_names(window.columns)).sum(axis=2), axis=0) if record.is_recorded else None
    excess = np.full(num_ranks, np.nan)
    if own is not None:
        for peers in peers_of(facts, min(num_ranks, len(own))):
            usual = median(own[peers])
            excess[peers] = own[peers] / usual - 1 if usual > 0 else np.nan
    return [_map(record, excess, own), _axes(record, window)]


def _map(record: RunRecord, excess: NDArray[Any], own: NDArray[Any] | None) -> Block:
    facts, hosts = record.facts, dict[str, list[dict[str, Any]]]()
    for rank, about in enumerate(facts.ranks):
        coordinates = coordinates_of(facts, rank)
        hosts.setdefault(str(about.get("host", "")) or "host", []).append(
            {"rank": rank, "place": "·".join(str(at) for at in coordinates.values()), "about": place_of(facts, rank),
             "device": str(about.get("device", "")), "excess": rounded(float(excess[rank]))}
        )  # fmt: skip
    slow = [rank for rank in np.argsort(-np.nan_to_num(excess, nan=-1.0)).tolist() if excess[rank] > 0.1][:3]
    axes = " × ".join(f"{axis} {size}" for axis, size in facts.axes.items()) or "one rank"
    says = f"{plural(len(hosts), 'host')}, {plural(len(facts.ranks), 'rank')} ({axes}). A rank's colour is its own time"
    says += " against its peers' median: " + (
        ", ".join(f"rank {rank} +{100 * excess[rank]:.0f} %" for rank in slow)
        + (" stands out." if len(slow) == 1 else " stand out.")
        if slow
        else "none stands out by 10 %."
    )
    newest = list(range(min(len(facts.ranks), MOST_ROWS)))
    columns = [
        index("rank", newest),
        text("host", [host_of(facts, rank) for rank in newest]),
        text("device", [facts.ranks[rank].get("device") for rank in newest]),
        text("place", [place_of(facts, rank) for rank in newest]),
        seconds("own time", [None if own is None or rank >= len(own) else float(own[rank]) for rank in newest]),
        number("against its peers", [100 * float(excess[rank]) for rank in newest], digits=2, unit="%"),
    ]
    named = [{"name": name, "ranks": members} for name, members in hosts.items()]
    return block("mesh", "Hosts and ranks", says, table(columns), hosts=named, axes=list(facts.axes))


def _axes(record: RunRecord, window: StepWindow) -> Block:
    """Return what the ranks of each axis share: whether it stays inside of hosts, and what it cost against the plan."""
    facts, num_ranks = record.facts, len(record.facts.ranks)
    planned: Mapping[str, float] = facts.predicted.get("seconds", {})
    names = list(axis_names(window.columns)) if record.is_recorded else [*facts.axes, "world"]
    groups = groups_of(facts, names, num_ranks)
    crossing = {
        axis: sum(len({host_of(facts, rank) for rank in members}) > 1 for members in groups[axis]) for axis in names
    }
    waits = [float(mean(window.column(f"exposed:{axis}"))) if record.is_recorded else None for axis in names]
    terms = [_planned_wait(planned, axis, names) for axis in names]
    columns = [
        text("axis", names),
        number("ranks in a group", [len(groups[axis][0]) for axis in names]),
        number("groups", [len(groups[axis]) for axis in names]),
        number("groups over several hosts", [crossing[axis] for axis in names]),
        seconds("waits", waits),
        seconds("plan", terms),
        number("against the plan", [100 * (wait / term - 1) if wait is not None and term else None
                                    for wait, term in zip(waits, terms, strict=True)], digits=2, unit="%"),
    ]  # fmt: skip
    far = [axis for axis in names if crossing[axis]]
    says = "Time per step that ranks wait along each axis of the mesh; the line in a bar is the plan. "
    says += f"Groups of {', '.join(far)} reach over several hosts." if far else "None reaches over several hosts."
    unit, scale = time_scale(waits)
    drawn = bars("Axes", says, "axis", names, {"exposed": [None if wait is None else wait * scale for wait in waits]},
                 unit=unit, total="")  # fmt: skip
    against = [None if term is None else rounded(term * scale) for term in terms]
    return drawn | {"table": table(columns), "against": against, "is_open": True}


def _planned_wait(planned: Mapping[str, float], axis: str, names: Sequence[str]) -> float | None:
    """Return the seconds per step that the plan says ranks wait along an axis; None where it tells them for several."""
    term = TERM_OF_AXIS.get(axis)
    if term is None or term not in planned or sum(TERM_OF_AXIS.get(name) == term for name in names) > 1:
        return None
    # Whoever waits for another stage waits in a receive, whether for its bytes or for its work.
    return planned[term] + (planned.get("bubble", 0.0) if axis == "pipeline" else 0.0)
