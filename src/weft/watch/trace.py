"""A run's kept steps as a trace for Perfetto (ui.perfetto.dev) and `chrome://tracing`.

Every rank is a process, ordered by its place in the mesh, with lanes for what it computes, for the collectives of each
axis, and for its waits; arrows lead from a microbatch's forward and backward to that of the next stage, and counters
show memory.  Format: "Trace Event Format", Google, version of 2016; times are microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weft.errors import LaunchError
from weft.watch.accounting import PHASE_TITLES
from weft.watch.run_record import RunRecord
from weft.watch.store import GenerationFacts, StepDetail

MOST_EVENTS = 1_000_000
"""Events of one trace: Perfetto's page takes about 2 GB, and unpacks this many into a quarter of it."""
COMPUTE, FIRST_AXIS, WAITS = 1, 10, 900
"""Numbers of lanes: spans, collectives of the first axis, and waits.  What overlaps gets the next number."""
_LANES_OF_AXIS = 10
_PASSES = ("forward", "backward")

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a trace holds."""

    steps: tuple[int, ...]
    num_events: int
    num_ranks: int
    left_out: int
    """Kept steps of the range that did not find room."""


class _Lane(NamedTuple):
    """Things of one lane in time order."""

    names: Sequence[str]
    starts: NDArray[np.int64]
    """Nanoseconds of the job's clock."""
    durations: NDArray[np.int64]
    arguments: Sequence[Mapping[str, Any]]


def write_trace(
    record: RunRecord, path: Path, *, first: int = 0, last: int | None = None, most: int = MOST_EVENTS
) -> TraceSummary:
    """Write the steps between two, both included, of the newest generation whose spans are kept.

    Args:
        record: the run.
        path: file to write; compressed where its name ends with `.gz`.
        most: events that it may hold; of more steps the newest are taken.

    Raises:
        LaunchError: no step of the range is kept, or the file cannot be written.
    """
    kept = record.detailed_steps()
    wanted = [step for step in kept if step >= first and (last is None or step <= last)]
    if not wanted:
        have = f"kept are {len(kept)} between {kept[0]} and {kept[-1]}" if kept else "the run has kept none"
        raise LaunchError(f"No step from {first} to {'the end' if last is None else last} has its spans: {have}.")
    steps, details = _newest(record, wanted, most)
    clock = _Clock(record, details)
    try:
        with _opened(path) as file:
            num = _write(file, _events(record, details, clock), record)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}. Name a file you may write.") from None
    ranks = {detail.rank for step in steps for detail in details[step]}
    return TraceSummary(steps=steps, num_events=num, num_ranks=len(ranks), left_out=len(wanted) - len(steps))


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _newest(record: RunRecord, wanted: Sequence[int], most: int) -> tuple[tuple[int, ...], dict[int, list[StepDetail]]]:
    """Return the newest steps that find room together, in rising order, and what is kept of them."""
    details: dict[int, list[StepDetail]] = {}
    size = 0
    for step in reversed(wanted):
        parts = record.details(step)
        # A collective may be two events, its transfer and its wait; a span one, and an end of an arrow.
        size += sum(2 * len(part.spans) + 2 * len(part.collectives) + 2 for part in parts)
        if details and size > most:
            break
        details[step] = parts
    return tuple(sorted(details)), details


def _write(file: IO[str], events: Iterable[Event], record: RunRecord) -> int:
    """Write events one by one, so that a large trace is never whole in memory."""
    facts = record.facts
    about: dict[str, Any] = {"run": record.name, "axes": dict(facts.axes), "versions": dict(facts.versions)}
    if facts.clock_error_seconds is not None:
        about["clock_error_seconds"] = facts.clock_error_seconds
    file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[\n')
    number = 0
    for number, event in enumerate(events, 1):
        file.write(("" if number == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return number


class _Clock:
    """One clock for all ranks, in nanoseconds from the begin of the trace.

    Ranks of one host share a monotonic clock.  Those of hosts differ: their steps begin where the collector says that
    they did, by its own clock, and the median over steps tells how far apart their clocks are.
    """

    def __init__(self, record: RunRecord, details: Mapping[int, Sequence[StepDetail]]) -> None:
        window, facts = record.window, record.facts
        begins = window.column("start") if len(window.steps) else None
        apart: dict[str, list[float]] = {}
        for step, parts in details.items():
            (row,) = np.flatnonzero(window.steps == step)[:1] if step in window.steps else (None,)
            firsts: dict[str, list[float]] = {}
            for part in parts:
                if row is not None and begins is not None and len(part.spans) and part.rank < begins.shape[1]:
                    wall = float(window.unix_times[row] - window.unix_times[0]) + float(begins[row, part.rank])
                    firsts.setdefault(_host(facts, part.rank), []).append(
                        1e9 * wall - int(part.spans["start_ns"].min())
                    )
            if len(firsts) > 1:
                base = min(firsts[min(firsts)])
                for host, values in firsts.items():
                    apart.setdefault(host, []).append(min(values) - base)
        self._offsets = {host: round(float(np.median(values))) for host, values in apart.items()}
        self._facts, self._base = facts, 0
        starts = [self.of(part.rank, part.spans["start_ns"]) for parts in details.values() for part in parts]
        self._base = min((int(values.min()) for values in starts if len(values)), default=0)

    def of(self, rank: int, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of a rank on the job's clock."""
        return times + (self._offsets.get(_host(self._facts, rank), 0) - self._base)


def _events(record: RunRecord, details: Mapping[int, Sequence[StepDetail]], clock: _Clock) -> Iterator[Event]:
    ranks = sorted({part.rank for parts in details.values() for part in parts})
    lanes: dict[int, dict[int, str]] = {rank: {} for rank in ranks}
    bounds: dict[int, tuple[int, int]] = {}
    for step in sorted(details):
        ends: list[int] = []
        begins: list[int] = []
        for part in details[step]:
            spans = _spans(part, clock)
            yield from _complete(part.rank, COMPUTE, spans, "compute")
            lanes[part.rank][COMPUTE] = "compute"
            yield from _collectives(part, clock, lanes[part.rank])
            if len(spans.starts):
                begins.append(int(spans.starts.min()))
                ends.append(int((spans.starts + spans.durations).max()))
                yield from _memory(record, part.rank, step, ends[-1])
        if ends:
            bounds[step] = min(begins), max(ends)
        yield from _arrows(record.facts, details[step], clock, step)
    yield from _steps(bounds, max(ranks, default=0) + 1)
    yield from _names(record.facts, lanes)


def _spans(part: StepDetail, clock: _Clock) -> _Lane:
    spans = part.spans[np.argsort(part.spans["start_ns"], kind="stable")]
    arguments: list[dict[str, Any]] = []
    for span in spans:
        values = {name: int(span[name]) for name in ("stage", "microbatch") if span[name] >= 0}
        if span["cpu_ns"] >= 0:
            values["on a processor, µs"] = int(span["cpu_ns"]) // 1000
        arguments.append(values)
    names = [_title(part.names[span["name"]], int(span["microbatch"])) for span in spans]
    return _Lane(names, clock.of(part.rank, spans["start_ns"]), spans["duration_ns"], arguments)


def _title(name: str, microbatch: int) -> str:
    title = PHASE_TITLES.get(name, name)
    return f"{title} {microbatch}" if microbatch >= 0 else title


def _collectives(part: StepDetail, clock: _Clock, lanes: dict[int, str]) -> Iterator[Event]:
    """Yield the transfers of each axis in lanes of their own, and the waits for them in one."""
    found = part.collectives[np.argsort(part.collectives["launched_ns"], kind="stable")]
    ends = np.where(found["done_ns"] > 0, found["done_ns"], found["waited_ns"] + found["exposed_ns"])
    names = [part.names[operation] for operation in found["operation"]]
    arguments = [{"axis": part.names[one["axis"]], "bytes": int(one["num_bytes"])} for one in found]
    for place, axis in enumerate(np.unique(found["axis"])):
        mine = np.flatnonzero(found["axis"] == axis)
        starts, durations = found["launched_ns"][mine], np.maximum(ends[mine] - found["launched_ns"][mine], 0)
        first = FIRST_AXIS + _LANES_OF_AXIS * place
        for number, rows in _without_overlap(starts, durations, _LANES_OF_AXIS):
            lane = _Lane([names[mine[row]] for row in rows], clock.of(part.rank, starts[rows]), durations[rows],
                         [arguments[mine[row]] for row in rows])  # fmt: skip
            title = f"{part.names[axis]} axis"
            lanes[first + number] = f"{title}, {number + 1}" if number else title
            yield from _complete(part.rank, first + number, lane, "communication")
    waits = np.flatnonzero((found["waited_ns"] > 0) & (found["exposed_ns"] > 0))
    starts, durations = found["waited_ns"][waits], found["exposed_ns"][waits]
    for number, rows in _without_overlap(starts, durations, _LANES_OF_AXIS):
        lane = _Lane([f"wait for {names[waits[row]]}" for row in rows], clock.of(part.rank, starts[rows]),
                     durations[rows], [arguments[waits[row]] for row in rows])  # fmt: skip
        lanes[WAITS + number] = f"waits, {number + 1}" if number else "waits"
        yield from _complete(part.rank, WAITS + number, lane, "waiting")


def _without_overlap(
    starts: NDArray[np.int64], durations: NDArray[np.int64], most: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield (lane, rows): things of one lane do not overlap, which viewers draw wrongly.  The last lane takes, cut off,
    what finds no room."""
    ends: list[int] = []
    rows: list[list[int]] = []
    for row in np.argsort(starts, kind="stable"):
        lane = next((number for number, end in enumerate(ends) if end <= starts[row]), len(ends))
        if lane == most:
            lane = most - 1
            before = rows[lane][-1]
            durations[before] = max(0, int(starts[row]) - int(starts[before]))
        if lane == len(ends):
            ends.append(0)
            rows.append([])
        ends[lane] = int(starts[row] + durations[row])
        rows[lane].append(int(row))
    for number, chosen in enumerate(rows):
        yield number, np.array(chosen, dtype=np.int64)


def _complete(rank: int, lane: int, things: _Lane, category: str) -> Iterator[Event]:
    for name, start, duration, arguments in zip(
        things.names, things.starts.tolist(), things.durations.tolist(), things.arguments, strict=True
    ):
        yield {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": lane, "ts": start / 1e3,
               "dur": max(duration, 0) / 1e3, "args": arguments}  # fmt: skip


def _arrows(facts: GenerationFacts, parts: Sequence[StepDetail], clock: _Clock, step: int) -> Iterator[Event]:
    """Yield arrows along which a microbatch goes through the stages of a pipeline, forward and back."""
    if facts.axes.get("pipeline", 1) < 2:
        return
    passes: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    for part in parts:
        place = tuple(sorted((axis, at) for axis, at in _coordinates(facts, part.rank).items() if axis != "pipeline"))
        starts = clock.of(part.rank, part.spans["start_ns"])
        for span, start in zip(part.spans, starts.tolist(), strict=True):
            name = part.names[span["name"]]
            if name in _PASSES and span["stage"] >= 0:
                key = (place, name, int(span["microbatch"]), int(span["stage"]))
                passes[key] = (part.rank, start, start + int(span["duration_ns"]))
    for (place, name, microbatch, stage), (rank, _, end) in passes.items():
        target = passes.get((place, name, microbatch, stage + 1 if name == "forward" else stage - 1))
        if target is None or target[0] == rank or target[1] < end:
            continue
        number = f"{step}.{rank}.{name[0]}{microbatch}.{stage}"
        common = {"name": "activations" if name == "forward" else "gradients", "cat": "pipeline", "id": number,
                  "tid": COMPUTE}  # fmt: skip
        # An arrow is bound to the slice that its point lies in: a moment before the end of the one.
        yield {"ph": "s", **common, "pid": rank, "ts": max(end - 1, 0) / 1e3}
        yield {"ph": "f", "bp": "e", **common, "pid": target[0], "ts": target[1] / 1e3}


def _memory(record: RunRecord, rank: int, step: int, at: int) -> Iterator[Event]:
    window = record.window
    rows = np.flatnonzero(window.steps == step)
    if len(rows) and rank < window.values.shape[1]:
        held = float(window.column("memory")[rows[0], rank])
        if np.isfinite(held) and held > 0:
            yield {"ph": "C", "name": "memory, MiB", "pid": rank, "tid": 0, "ts": at / 1e3,
                   "args": {"held": round(held / 2**20, 3)}}  # fmt: skip


def _steps(bounds: Mapping[int, tuple[int, int]], process: int) -> Iterator[Event]:
    """Yield a process of its own whose one lane shows which step is when."""
    yield _metadata("process_name", process, 0, {"name": "steps"})
    yield _metadata("process_sort_index", process, 0, {"sort_index": -1})
    earlier = 0
    for step, (begin, end) in bounds.items():
        start = max(begin, earlier)
        yield {"ph": "X", "name": f"step {step}", "cat": "step", "pid": process, "tid": COMPUTE, "ts": start / 1e3,
               "dur": max(end - start, 0) / 1e3, "args": {}}  # fmt: skip
        earlier = end


def _names(facts: GenerationFacts, lanes: Mapping[int, Mapping[int, str]]) -> Iterator[Event]:
    """Yield names and order of processes and lanes."""
    order = sorted(lanes, key=lambda rank: ([_coordinates(facts, rank).get(axis, 0) for axis in facts.axes], rank))
    for place, rank in enumerate(order):
        where = ", ".join(f"{axis} {at}" for axis, at in _coordinates(facts, rank).items())
        host = _host(facts, rank)
        name = f"rank {rank}" + (f" · {where}" if where else "") + (f" · {host}" if host else "")
        yield _metadata("process_name", rank, 0, {"name": name})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": place})
        for lane, title in lanes[rank].items():
            yield _metadata("thread_name", rank, lane, {"name": title})
            yield _metadata("thread_sort_index", rank, lane, {"sort_index": lane})


def _metadata(name: str, process: int, lane: int, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": lane, "ts": 0, "args": dict(arguments)}


def _coordinates(facts: GenerationFacts, rank: int) -> Mapping[str, int]:
    return cast("Mapping[str, int]", facts.ranks[rank].get("coordinates", {})) if rank < len(facts.ranks) else {}


def _host(facts: GenerationFacts, rank: int) -> str:
    return str(facts.ranks[rank].get("host", "")) if rank < len(facts.ranks) else ""
