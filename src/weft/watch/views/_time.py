"""Where time goes between ranks: the pipeline's schedule, measured under planned, and communication by axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.formatting import format_bytes, format_percent, format_seconds
from weft.watch.accounting import PHASE_TITLES, axis_names
from weft.watch.run_record import RunRecord
from weft.watch.store import StepDetail
from weft.watch.verdicts import stages_of
from weft.watch.views._blocks import (
    Block,
    bars,
    block,
    choice,
    chosen,
    controls,
    note,
    number,
    plural,
    rounded,
    seconds,
    table,
    text,
    time_scale,
)
from weft.watch.views._common import coordinates_of, groups_of, host_of, mean, not_recorded, recent, span_of_steps

_MOST_LANES = 32
_BUBBLES: Mapping[str, str] = {
    "bubble:fill": "filling",
    "bubble:drain": "draining",
    "bubble:imbalance": "unequal stages",
}


def pipeline(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page.  Options: `step`, and `row` (which replica of the pipeline)."""
    if not record.is_recorded:
        return [not_recorded(record)]
    detailed = record.detailed_steps()
    if not detailed:
        return [
            note("One step", "The spans of no step are kept yet: those of the first recorded step come within seconds.")
        ]
    step = chosen(options, "step", map(str, detailed), str(detailed[-1]))
    rows = _rows(record)
    row = chosen(options, "row", map(str, range(len(rows))), "0")
    details = {detail.rank: detail for detail in record.details(int(step))}
    lanes = [rank for rank in rows[int(row)] if rank in details][:_MOST_LANES]
    newest = detailed[-60:]
    names = [(str(at), _row_name(record, members)) for at, members in enumerate(rows)]
    shown: list[Block] = [
        controls(choice("step", "step", [(str(known), f"{known:,}") for known in newest], step),
                 choice("row", "ranks", names[:64], row)),
        _gantt(record, int(step), lanes, details),
    ]  # fmt: skip
    split = _bubble_split(record)
    return [*shown, *([split] if split else [])]


def _rows(record: RunRecord) -> list[list[int]]:
    """Return the ranks that are drawn under one another: one of each stage, or all where there is one stage."""
    stages = stages_of(record.facts)
    if not stages:
        everyone = list(range(record.num_ranks))
        return [everyone[at : at + _MOST_LANES] for at in range(0, len(everyone), _MOST_LANES)]
    return groups_of(record.facts, ["pipeline"], record.num_ranks)["pipeline"]


def _row_name(record: RunRecord, members: Sequence[int]) -> str:
    if not stages_of(record.facts):
        return f"{members[0]} to {members[-1]}"
    at = {axis: index for axis, index in coordinates_of(record.facts, members[0]).items() if axis != "pipeline"}
    return ", ".join(f"{axis} {index}" for axis, index in at.items()) or "all"


def _gantt(record: RunRecord, step: int, lanes: Sequence[int], details: Mapping[int, StepDetail]) -> Block:
    planned = [
        span
        for span in record.facts.predicted.get("spans", ())
        if span[1] in PHASE_TITLES or span[1].endswith("_backward")
    ]
    spans = {rank: _spans(details[rank]) for rank in lanes}
    first = {rank: min((span[1] for span in spans[rank]), default=0.0) for rank in lanes}
    hosts, error = {host_of(record.facts, rank) for rank in lanes}, record.facts.clock_error_seconds
    if len(hosts) == 1 and lanes:
        first = dict.fromkeys(lanes, min(first.values()))
    elif error is not None and step in record.window.steps:
        # A rank's first span begins with its step, whose begin is known on one clock.
        begins = record.window.column("start")[int(np.flatnonzero(record.window.steps == step)[0])]
        first = {rank: first[rank] - float(np.nan_to_num(begins[rank])) for rank in lanes}
    kinds: dict[str, None] = {}
    drawn: list[dict[str, Any]] = []
    has_stages = bool(stages_of(record.facts))
    stage_count = max((int(span[0]) for span in planned), default=-1) + 1
    for stage in range(stage_count if has_stages or stage_count == 1 else 0):
        own = [(str(span[1]), float(span[4]), float(span[5]), int(span[3])) for span in planned if span[0] == stage]
        drawn.append({"name": f"plan, stage {stage}" if has_stages else "plan", "planned": True, "spans": own})
    for rank in lanes:
        stage = coordinates_of(record.facts, rank).get("pipeline")
        own = [
            (kind, start - first[rank], stop - first[rank], microbatch) for kind, start, stop, microbatch in spans[rank]
        ]
        drawn.append(
            {"name": f"rank {rank}" + (f", stage {stage}" if stage is not None else ""), "planned": False, "spans": own}
        )
    end = max((span[2] for lane in drawn for span in lane["spans"]), default=1e-3)
    unit, scale = time_scale([end])
    for lane in drawn:
        for span in lane["spans"]:
            kinds.setdefault(span[0])
    order = list(kinds)
    busy = {lane["name"]: sum(span[2] - span[1] for span in lane["spans"] if span[0] != "waiting") for lane in drawn}
    columns = [
        text("lane", list(busy)),
        number("spans", [len(lane["spans"]) for lane in drawn]),
        seconds("busy", list(busy.values())),
        seconds("ends after", [max((span[2] for span in lane["spans"]), default=None) for lane in drawn]),
    ]
    for lane in drawn:
        lane["spans"] = [[order.index(kind), rounded(start * scale), rounded(stop * scale), microbatch]
                         for kind, start, stop, microbatch in lane["spans"]]  # fmt: skip
    says = f"Step {step:,} as ranks measured it, {format_seconds(end)} long; numbers are microbatches."
    says += (
        " The plan's schedule stands above, on the same axis." if planned else " No plan's schedule is known for it."
    )
    if len(hosts) > 1 and error is not None:
        says += f" Hosts have clocks of their own: a lane may be off by ± {format_seconds(error)}."
    elif len(hosts) > 1:
        says += " Lanes of several hosts each begin with their own first span."
    titles = [PHASE_TITLES.get(kind, kind.replace("_", " ")) for kind in order]
    return block("gantt", "One step" if not has_stages else "One step by stage", says, table(columns), lanes=drawn,
                 kinds=titles, unit=unit, end=rounded(end * scale))  # fmt: skip


def _spans(detail: StepDetail) -> list[tuple[str, float, float, int]]:
    """Return (kind, start, stop, microbatch) of a rank's spans and of its waits, in seconds of its own clock."""
    found = [
        (detail.names[int(span["name"])], int(span["start_ns"]) / 1e9,
         (int(span["start_ns"]) + int(span["duration_ns"])) / 1e9, int(span["microbatch"]))
        for span in detail.spans
        if detail.names[int(span["name"])] != "forward_backward"
    ]  # fmt: skip
    found += [
        ("waiting", int(wait["waited_ns"]) / 1e9, (int(wait["waited_ns"]) + int(wait["exposed_ns"])) / 1e9, -1)
        for wait in detail.collectives
        if wait["waited_ns"] > 0 and wait["exposed_ns"] > 0
    ]
    return found


def _bubble_split(record: RunRecord) -> Block | None:
    """Return what a stage's step consists of."""
    stages = stages_of(record.facts)
    if not stages:
        return None
    window = recent(record.window)
    unit, scale = time_scale([float(mean(window.column("wall")))])

    def of_stage(column: str) -> list[float | None]:
        return [float(mean(window.column(column)[:, members])) * scale for members in stages]

    parts = {"computing": of_stage("compute"), "communication": of_stage("communication")}
    parts |= {title: of_stage(column) for column, title in _BUBBLES.items()}
    parts |= {"waiting for data": of_stage("input"), "outside of phases": of_stage("idle")}
    bubble, wall = float(mean(window.column("bubble"))), float(mean(window.column("wall")))
    planned = record.facts.predicted.get("seconds", {}).get("bubble")
    says = (
        f"Mean of {span_of_steps(window)}: stages wait {format_seconds(bubble)} of each step for one another,"
        f" {format_percent(100 * bubble / wall if wall else 0)} of it"
    )
    says += f"; the plan says {format_seconds(planned)}." if planned else "."
    return bars("Bubble by stage", says, "stage", [str(stage) for stage in range(len(stages))], parts, unit=unit)


class AxisTraffic(NamedTuple):
    """What went along one axis in a step, by operation."""

    axis: str
    operation: str
    calls: float
    num_bytes: float
    """Mean over ranks."""
    planned_bytes: float | None
    group_size: int
    transfer_seconds: float | None
    """Time of the rank that waits least in each collective, added up: what the transfer alone takes."""
    skew_seconds: float | None
    """Mean over ranks of the rest: waiting for ranks that come late."""
    rate: float | None
    """Bytes per second that each rank's link carried, by the least that any algorithm must send."""


def communication(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page."""
    if not record.is_recorded:
        return [not_recorded(record)]
    window = recent(record.window)
    axes = [axis for axis in axis_names(window.columns) if float(np.nansum(window.column(f"total:{axis}"))) > 0]
    if not axes:
        return [note("Communication", "No rank has communicated in these steps.")]
    exposed = [float(mean(window.column(f"exposed:{axis}"))) for axis in axes]
    total = [float(mean(window.column(f"total:{axis}"))) for axis in axes]
    hidden = [max(all_ - open_, 0.0) for all_, open_ in zip(total, exposed, strict=True)]
    unit, scale = time_scale([max(total)])
    most = int(np.argmax(exposed))
    says = (
        f"Time per step from launch to end of collectives, mean over ranks of {span_of_steps(window)}: exposed is what"
        f" ranks wait for, hidden what they compute beside. Most is exposed along {axes[most]},"
        f" {format_seconds(exposed[most])}."
    )
    parts = {"exposed": [value * scale for value in exposed], "hidden": [value * scale for value in hidden]}
    drawn = bars("Exposed and hidden, by axis", says, "axis", axes, parts, unit=unit)
    return [drawn, *_traffic_blocks(record)]


def _traffic_blocks(record: RunRecord) -> list[Block]:
    rows = traffic_rows(record)
    if not rows:
        return []
    unlike = [
        row
        for row in rows
        if row.planned_bytes is not None and abs(row.num_bytes - row.planned_bytes) > 0.01 * row.planned_bytes
    ]
    known = [row for row in rows if row.planned_bytes is not None]
    says = f"One step of one rank: {format_bytes(sum(row.num_bytes for row in rows))} in all. "
    if not known:
        says += "What the plan would send is not known."
    elif unlike:
        says += (
            f"{plural(len(unlike), 'row')} not within 1 % of the plan, first {unlike[0].axis} {unlike[0].operation}."
        )
    else:
        says += "Every row whose plan is known carries what the plan says."
    says += " Transfer is the time of the rank that waits least, skew what the others wait longer."
    columns = [
        text("axis", [row.axis for row in rows]),
        text("operation", [row.operation.replace("_", " ") for row in rows]),
        number("ranks", [row.group_size for row in rows]),
        number("calls", [row.calls for row in rows]),
        number("measured", [row.num_bytes / 1e6 for row in rows], unit="MB"),
        number("plan", [None if row.planned_bytes is None else row.planned_bytes / 1e6 for row in rows], unit="MB"),
        seconds("transfer", [row.transfer_seconds for row in rows]),
        seconds("skew", [row.skew_seconds for row in rows]),
        number("rate", [None if row.rate is None else row.rate / 1e9 for row in rows], unit="GB/s"),
    ]
    sent = {"measured": [row.num_bytes / 1e6 for row in rows]}
    names = [f"{row.axis}: {row.operation.replace('_', ' ')}" for row in rows]
    told = "Bytes that one rank hands to collectives in a step; the line in a bar is the plan."
    drawn = bars("Bytes by axis and operation", told, "collective", names, sent, unit="MB", total="")
    drawn["against"] = [None if row.planned_bytes is None else rounded(row.planned_bytes / 1e6) for row in rows]
    return [block("table", "Traffic", says, table(columns)), drawn]


def traffic_rows(record: RunRecord) -> list[AxisTraffic]:
    """Return what was sent in the newest step, by axis and operation."""
    by_rank, planned = record.traffic(), record.facts.predicted.get("traffic", {})
    kinds = sorted(
        {(axis, operation) for axes in by_rank.values() for axis, sums in axes.items() for operation in sums}
    )
    times = _transfer_times(record)
    groups = groups_of(record.facts, {axis for axis, _ in kinds}, record.num_ranks)
    rows: list[AxisTraffic] = []
    for axis, operation in kinds:
        sums = np.mean([axes.get(axis, {}).get(operation, (0, 0)) for axes in by_rank.values()], axis=0).tolist()
        plan = planned.get(axis, {}).get(operation)
        size = max(map(len, groups[axis]))
        transfer, skew, moved = times.get((axis, operation), (None, None, 0.0))
        rows.append(
            AxisTraffic(
                axis, operation, float(sums[0]), float(sums[1]),
                float(plan[1]) if plan else None, size, transfer, skew,
                moved * _least_share(operation, size) / transfer if transfer and moved else None,
            )
        )  # fmt: skip
    return rows


def _least_share(operation: str, size: int) -> float:
    """Return the part of a tensor that each rank's link must carry at least, whatever the algorithm.

    Source: NCCL's "bus bandwidth" (nccl-tests, doc/PERFORMANCE.md).
    """
    if size < 2:
        return 0.0
    share = (size - 1) / size
    if operation.startswith("all_reduce"):
        return 2 * share
    return share if operation.startswith(("all_gather", "reduce_scatter", "all_to_all")) else 1.0


def _transfer_times(record: RunRecord) -> dict[tuple[str, str], tuple[float | None, float | None, float]]:
    """Return (transfer, skew, bytes) of the newest detailed step, by axis and operation.

    The n-th collective of a group is one and the same on all its ranks.  The rank that comes last waits for the
    transfer alone, so that the shortest duration is the transfer; no clocks are compared.
    """
    detailed = record.detailed_steps()
    if not detailed:
        return {}
    durations: dict[tuple[str, str], dict[int, Any]] = {}
    sizes: dict[tuple[str, str], dict[int, float]] = {}
    for detail in record.details(detailed[-1]):
        ended = detail.collectives[detail.collectives["done_ns"] > 0]
        for axis, operation in {(int(row["axis"]), int(row["operation"])) for row in ended}:
            mine = ended[(ended["axis"] == axis) & (ended["operation"] == operation)]
            key = (detail.names[axis], detail.names[operation])
            durations.setdefault(key, {})[detail.rank] = (mine["done_ns"] - mine["launched_ns"]) / 1e9
            sizes.setdefault(key, {})[detail.rank] = float(mine["num_bytes"].sum())
    found: dict[tuple[str, str], tuple[float | None, float | None, float]] = {}
    groups = groups_of(record.facts, {axis for axis, _ in durations}, record.num_ranks)
    for key, by_rank in durations.items():
        transfers, skews = [], []
        for group in groups[key[0]]:
            mine = [by_rank[rank] for rank in group if rank in by_rank]
            if len({len(each) for each in mine}) != 1 or len(mine) < 2 or key[1] in ("send", "receive"):
                continue  # ranks of a group do not send alike
            shortest = np.min(np.stack(mine), axis=0)
            transfers.append(float(shortest.sum()))
            skews.append(float((np.stack(mine) - shortest).sum(axis=1).mean()))
        moved = float(np.mean(list(sizes[key].values())))
        found[key] = (float(np.mean(transfers)), float(np.mean(skews)), moved) if transfers else (None, None, moved)
    return found
