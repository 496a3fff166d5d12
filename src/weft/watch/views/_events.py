"""What happened to a run: saves, evaluations, failures, generations; and the page of a run that hangs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from weft.events import format_duration, format_loss
from weft.formatting import format_seconds
from weft.watch.accounting import phase_title
from weft.watch.run_record import RunRecord
from weft.watch.views._blocks import Block, block, index, note, number, plural, seconds, table, text
from weft.watch.views._common import (
    EVENT_TITLES,
    few,
    groups_of,
    hang_block,
    host_of,
    place_of,
)

_JOB = "job"
_MOST_MARKS = 400


def events(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page."""
    strip = events_strip(record)
    happened = _happened(record)
    newest = happened[-200:][::-1]
    columns = [
        text("time", [_clock(event["time"]) for event in newest]),
        number("step", [event["step"] for event in newest]),
        text("what", [EVENT_TITLES.get(event["kind"], event["kind"]) for event in newest]),
        text("where", [event["lane"] for event in newest]),
        text("details", [event["text"] for event in newest]),
    ]
    lost = _lost(record)
    says = f"{plural(len(happened), 'event')}, the newest first."
    return [strip, *([lost] if lost else []), block("table", "Everything that happened", says, table(columns))]


def events_strip(record: RunRecord) -> Block:
    """Return what happened over time, a lane for the job and one for every host, generations shaded."""
    happened = _happened(record)[-_MOST_MARKS:]
    first, last = _range(record)
    hosts = list(dict.fromkeys(str(rank.get("host", "")) for rank in record.facts.ranks if rank.get("host")))[:32]
    known = {_JOB, *hosts}
    marks = [{**event, "lane": event["lane"] if event["lane"] in known else _JOB} for event in happened]
    begins = [(facts.number, facts.unix_time) for facts in record.generations] or [(1, first)]
    ends = [begin for _, begin in begins[1:]] + [last]
    shades = [{"name": f"generation {number}", "from": begin, "to": end}
              for (number, begin), end in zip(begins, ends, strict=True)]  # fmt: skip
    counts = {kind: sum(event["kind"] == kind for event in happened) for kind in EVENT_TITLES}
    told = ", ".join(f"{count} × {EVENT_TITLES[kind]}" for kind, count in counts.items() if count)
    says = f"{plural(len(begins), 'generation')} in {format_duration(last - first)}" + (
        f": {told}." if told else "; nothing else happened."
    )
    shown = table(
        [
            text("generation", [str(number) for number, _ in begins]),
            text("began", [_clock(begin) for _, begin in begins]),
            text("took", [format_duration(end - begin) for (_, begin), end in zip(begins, ends, strict=True)]),
            number("ranks", [facts.world_size for facts in record.generations] or [record.num_ranks or None]),
        ]
    )
    return block("timeline", "Events", says, shown, lanes=[_JOB, *hosts], marks=marks, shades=shades,
                 titles=dict(EVENT_TITLES), **{"from": first, "to": last})  # fmt: skip


def _lost(record: RunRecord) -> Block | None:
    """Return what every new generation cost."""
    begins = [event for event in record.events if event.get("kind") == "generation"]
    if not begins:
        return None
    again = [max(0, int(event.get("failed_step") or 0) - 1 - int(event.get("restored_step") or 0)) for event in begins]
    columns = [
        number("generation", [event.get("number") for event in begins]),
        number("ranks", [event.get("world_size") for event in begins]),
        text("because of", [event.get("failure") for event in begins]),
        text("rank", [event.get("rank") if event.get("failure") != "replan" else None for event in begins]),
        text("host", [event.get("host") for event in begins]),
        number("failed in step", [event.get("failed_step") or None for event in begins]),
        number("went on from", [event.get("restored_step") for event in begins]),
        number("steps done again", again),
        text("cause", [event.get("plan_change") or event.get("cause") for event in begins]),
    ]
    says = f"The ranks began again {plural(len(begins), 'time')}; {plural(sum(again), 'step')} had to be done twice."
    return block("table", "Generations", says, table(columns))


def _happened(record: RunRecord) -> list[dict[str, Any]]:
    """Return events with `time`, `lane`, `kind`, `step` and `text`, in order."""
    found = [_told(event) for event in record.events]
    found += [
        {
            "time": gap.unix_time,
            "lane": _JOB if gap.rank < 0 else host_of(record.facts, gap.rank) or _JOB,
            "kind": "gap",
            "step": gap.step,
            "text": gap.reason,
        }
        for gap in record.gaps
    ]
    return sorted(found, key=lambda event: event["time"])


def _told(event: Mapping[str, Any]) -> dict[str, Any]:
    kind, step = str(event.get("kind", "")), event.get("step")
    lane, said = _JOB, str(event.get("text") or "")
    if kind == "checkpoint":
        said = (
            str(event.get("problem") or "") or f"training waited {format_seconds(float(event.get('seconds') or 0.0))}"
        )
        kind = "failure" if event.get("problem") else kind
    elif kind == "evaluation":
        loss = event.get("validation_loss")
        said = "validation loss " + (format_loss(float(loss)) if loss is not None else "not finite")
    elif kind == "failure":
        said, lane = f"rank {event.get('rank')}: {event.get('error')}: {said}", str(event.get("host") or _JOB)
    elif kind == "generation":
        said, step = f"{event.get('failure')}: {event.get('cause')}", event.get("failed_step") or None
        lane = str(event.get("host") or _JOB)
    return {
        "time": float(event.get("unix_time_seconds") or 0.0),
        "lane": lane,
        "kind": kind,
        "step": step,
        "text": said,
    }


def _range(record: RunRecord) -> tuple[float, float]:
    """Return when the run began, and when it ended or what time it is."""
    begins = [facts.unix_time for facts in record.generations] + [row.unix_time for row in record.steps[:1]]
    times = [event["time"] for event in _happened(record) if event["time"]]
    first = min([*begins, *times[:1]], default=time.time())
    newest = [row.unix_time + row.seconds * row.num_steps for row in record.steps[-1:]]
    last = time.time() if record.stall is not None else max([*newest, *times[-1:]], default=first)
    return first, max(last, first + 1e-3)


def _clock(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time)) if unix_time else ""


def hang(record: RunRecord, options: Mapping[str, str]) -> list[Block]:
    """Return the blocks of the page: who is missing in which collective, and what every rank was doing."""
    banner = hang_block(record)
    found = [verdict for verdict in record.stored_verdicts if verdict.get("kind") == "hang"]
    blocks = [banner or _goes_on(record)]
    if found:
        blocks.append(_earlier(found))
    if not record.live:
        return [
            *blocks,
            note("Where ranks are", "No rank has said where it is: the run has ended, or was not recorded."),
        ]
    return [*blocks, _collectives(record), _where(record), _stacks(record)]


def _goes_on(record: RunRecord) -> Block:
    if record.state != "running":
        what = {"ended": "The run has ended.", "lost": "The run's process is gone."}
        return note("No hang", what.get(record.state, "Nothing says that the run goes on."))
    says = f"The newest step ended {format_duration(record.silent_seconds)} ago"
    says += f"; one usually takes {format_seconds(record.usual_seconds)}."
    return note("It does not hang", says)


def _earlier(found: list[dict[str, Any]]) -> Block:
    columns = [
        text("time", [_clock(float(verdict["unix_time"])) for verdict in found]),
        number("behind step", [verdict["step"] for verdict in found]),
        text("what", [verdict.get("title") for verdict in found]),
        text("evidence", ["; ".join(verdict.get("evidence", ())) for verdict in found]),
        text("next", [verdict.get("next") for verdict in found]),
    ]
    return block("table", "Hangs that were found", f"{plural(len(found), 'finding')} of this run.", table(columns))


def _where(record: RunRecord) -> Block:
    absent = record.stall.ranks if record.stall is not None else ()
    ranks = sorted(record.live, key=lambda rank: (rank not in absent, rank))[:512]
    states = [record.live[rank] for rank in ranks]
    now = time.time() if record.state == "running" else max(float(state["unix_time"]) for state in states)
    opens = [state.get("open") or {} for state in states]
    columns = [
        index("rank", ranks),
        text("host", [host_of(record.facts, rank) for rank in ranks]),
        text("place", [place_of(record.facts, rank) for rank in ranks]),
        text("state", [_state(record.live[rank], is_missing=rank in absent) for rank in ranks]),
        text("phase", [phase_title(str(state.get("phase") or "")) for state in states]),
        text("collective", [f"{open_['operation']} along {open_['axis']}" if open_ else None for open_ in opens]),
        seconds("open for", [open_.get("seconds") for open_ in opens]),
        number("step", [state.get("step") for state in states]),
        text("process", [state.get("pid") for state in states]),
        seconds("seen before", [max(now - float(state["unix_time"]), 0.0) for state in states]),
    ]  # fmt: skip
    says = "What each rank was doing when its host's agent looked last, the missing ones first."
    return block("table", "Where ranks are", says, table(columns))


def _state(state: Mapping[str, Any], *, is_missing: bool) -> str:
    if state.get("is_stopped"):
        return "stopped (SIGSTOP)"
    if not state.get("is_alive", True):
        return "its process is gone"
    return "others wait for it" if is_missing else "waits" if state.get("open") else "at work"


def _collectives(record: RunRecord) -> Block:
    """Return how many collectives of each axis ranks have completed, and who is behind its group."""
    axes = sorted({axis for state in record.live.values() for axis in state.get("completed") or {}})
    groups = groups_of(record.facts, axes, record.num_ranks)
    rows: list[tuple[str, int, int, str, str]] = []
    for axis in axes:
        numbers = {rank: int((state.get("completed") or {}).get(axis, 0)) for rank, state in record.live.items()}
        behind: list[int] = []
        for members in groups[axis]:
            most = max((numbers[rank] for rank in members if rank in numbers), default=0)
            behind += [rank for rank in members if rank in numbers and numbers[rank] < most]
        waiting = [rank for rank, state in record.live.items() if (state.get("open") or {}).get("axis") == axis]
        # Stages of a pipeline do not send equally often.
        told = "" if axis == "pipeline" else few(behind) or "none"
        rows.append((axis, min(numbers.values()), max(numbers.values()), told, few(waiting) or "none"))
    columns = [
        text("axis", [row[0] for row in rows]),
        number("fewest", [row[1] for row in rows]),
        number("most", [row[2] for row in rows]),
        text("ranks behind their group", [row[3] for row in rows]),
        text("ranks that wait", [row[4] for row in rows]),
    ]
    says = "Collectives of each axis that ranks have completed since they began."
    says += " A rank that is behind its group, or that does not wait where the others do, has not joined."
    return block("table", "Collectives", says, table(columns))


def _stacks(record: RunRecord) -> Block:
    """Return what Python ran on every rank, ranks with one and the same stack together."""
    alike: dict[str, list[int]] = {}
    for rank, state in record.live.items():
        if state.get("stack"):
            alike.setdefault(str(state["stack"]), []).append(rank)
    if not alike:
        return note("Stacks", "No stacks were taken: they are where a run stands still for some seconds.")
    groups = [{"title": f"{plural(len(ranks), 'rank')}: {few(ranks)}", "text": stack}
              for stack, ranks in sorted(alike.items(), key=lambda item: len(item[1]))]  # fmt: skip
    says = f"{plural(len(groups), 'different stack')}; the rarest first, for it is the one that differs."
    return block("texts", "Stacks", says, texts=groups)
