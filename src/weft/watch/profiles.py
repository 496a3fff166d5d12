"""What ranks have profiled: operators with their own times, read from the traces that the ranks have written."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from weft.events.profile_request import facts_path, trace_path
from weft.formatting import format_seconds

_MOST_ROWS = 15
_NAME_WIDTH = 44
NO_OPERATOR = "(no operator: Python, other code)"
_CPU, _DEVICE = ("cpu_op",), ("kernel", "gpu_memcpy", "gpu_memset")
_OF_PROFILER = ("<forked function>", "ending")
"""What profiling costs under `cpu:weft`, which shows each collective by them (`weft.comm.shared_memory._profiler`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """What an operator took on one rank."""

    seconds: float
    """Seconds of its own per step, without operators that it called; of kernels, on the device."""
    calls: float
    """Calls per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """One rank's part in a window."""

    rank: int
    host: str
    steps: tuple[int, int]
    """First and last step."""
    step_seconds: float
    """Seconds per step, which the profiler has made longer."""
    operators: Mapping[str, OperatorTime]
    trace: Path


def read_window(window: Path, ranks: Iterable[int]) -> list[RankProfile]:
    """Return the profiles of these ranks in one window, in this order; none of a rank that has not written its own."""
    return [profile for rank in ranks for profile in _profile(window, rank)]


def _profile(window: Path, rank: int) -> list[RankProfile]:
    try:
        facts: dict[str, Any] = json.loads(facts_path(window, rank).read_text())
        first, last = int(facts["first_step"]), int(facts["last_step"])
        number, seconds = last - first + 1, float(facts["seconds"])
        if number < 1:
            return []
        trace = trace_path(window, rank)
        operators = operators_of(json.loads(trace.read_text()), number, seconds)
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        RankProfile(rank=rank, host=str(facts.get("host", "")), steps=(first, last), step_seconds=seconds / number,
                    operators=operators, trace=trace)
    ]  # fmt: skip


def operators_of(trace: Mapping[str, Any], num_steps: int, seconds: float) -> dict[str, OperatorTime]:
    """Return what each operator of a trace took per step, the costliest first.

    An operator's own time is its time without operators that it called.  `NO_OPERATOR` is what is left of the `seconds`
    of the window when no thread was in an operator: with an accelerator, autograd runs the backward in another.
    """
    lanes: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind, name, took = event.get("cat"), str(event["name"]), float(event["dur"])
        if kind in _CPU:
            lanes[event["pid"], event["tid"]].append((float(event["ts"]), -took, name))
        elif kind in _DEVICE:
            spent[f"{name} (device)"][0] += took
            spent[f"{name} (device)"][1] += 1
    for lane in lanes.values():
        _add_own_times(sorted(lane), spent)
    busy = _union(chain.from_iterable(lanes.values()))
    spent[NO_OPERATOR] = [max(seconds * 1e6 - busy, 0.0), float(num_steps)]
    told = ((name, values) for name, values in spent.items() if name not in _OF_PROFILER)
    ordered = sorted(told, key=lambda item: -item[1][0])
    return {
        name: OperatorTime(seconds=took / 1e6 / num_steps, calls=calls / num_steps) for name, (took, calls) in ordered
    }


_Span = tuple[float, float, str]
"""(begin, −duration, name) in microseconds: sorted, a caller stands before what it calls."""


def _add_own_times(lane: Iterable[_Span], spent: dict[str, list[float]]) -> None:
    """Add the own times of one thread's operators, in their order."""
    open_until: list[tuple[float, str]] = []
    for begin, negative, name in lane:
        while open_until and open_until[-1][0] <= begin:
            open_until.pop()
        if open_until:
            spent[open_until[-1][1]][0] += negative
        spent[name][0] -= negative
        spent[name][1] += 1
        open_until.append((begin - negative, name))


def _union(spans: Iterable[_Span]) -> float:
    """Return the time in which there was any of these."""
    total, until = 0.0, float("-inf")
    for begin, negative, _ in sorted(spans):
        end = begin - negative
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def compare(profiles: Sequence[RankProfile]) -> list[tuple[str, list[OperatorTime | None]]]:
    """Return each operator with its time on each of the ranks; None: that rank has not called it.

    What takes the first rank more than the last comes first: of the two the last has waited for the first, which shows
    as a wait.  For one rank, what took longest.
    """
    names = {name for each in profiles for name in each.operators}
    rows = [(name, [each.operators.get(name) for each in profiles]) for name in names]
    return sorted(rows, key=lambda row: (-_more(row[1]), row[0]))


def _more(times: Sequence[OperatorTime | None]) -> float:
    taken = [0.0 if each is None else each.seconds for each in times]
    return taken[0] - (taken[-1] if len(taken) > 1 else 0.0)


def profile_lines(found: Sequence[RankProfile]) -> list[str]:
    """Return a table of operators for a terminal, of at most four ranks, and where the traces are."""
    shown = found[:4]
    heads = [f"rank {each.rank}" for each in shown]
    lines = [
        f"steps     {first} to {last} of rank {each.rank}: {format_seconds(each.step_seconds)} per step"
        for each in shown
        for first, last in [each.steps]
    ]
    lines += ["", f"{'ms per step':{_NAME_WIDTH}}" + "".join(f"{head:>11}" for head in heads) + f"{'calls':>9}"]
    for name, times in compare(shown)[:_MOST_ROWS]:
        short = name if len(name) < _NAME_WIDTH else name[: _NAME_WIDTH - 2] + "…"
        cells = "".join("          –" if each is None else f"{1e3 * each.seconds:>11.3f}" for each in times)
        calls = max(each.calls for each in times if each is not None)
        lines.append(f"{short:{_NAME_WIDTH}}{cells}{calls:>9.4g}")
    lines += ["", *(f"trace     {each.trace}" for each in found)]
    return [*lines, "Open a trace in https://ui.perfetto.dev (the file stays in the browser), or in chrome://tracing."]
