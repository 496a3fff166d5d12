"""A run's kept steps become a trace in the Trace Event Format, which Perfetto and chrome://tracing draw."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from recorded_runs import MadeUpRun

from weft.cli import build_app
from weft.errors import LaunchError
from weft.watch.run_record import RunRecord
from weft.watch.store import COLLECTIVE, SPAN, StepDetail
from weft.watch.trace import COMPUTE, write_trace

NUMBER = {"type": "number", "minimum": 0}
COMMON = {
    "pid": {"type": "integer"},
    "tid": {"type": "integer"},
    "name": {"type": "string", "minLength": 1},
    "ts": NUMBER,
}
NAMES = ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]


def of(phase: str, more: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Schema of the events of one phase."""
    return {
        "type": "object",
        "properties": {"ph": {"const": phase}, "cat": {"type": "string"}, "args": {"type": "object"}, **COMMON, **more},
        "required": ["ph", "pid", "tid", "name", "ts", *required],
        "additionalProperties": False,
    }


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    of("X", {"dur": NUMBER}, ["dur", "cat"]),
                    of("M", {"name": {"enum": NAMES}}, ["args"]),
                    of("C", {}, ["args"]),
                    of("s", {"id": {"type": "string"}}, ["id", "cat"]),
                    of("f", {"id": {"type": "string"}, "bp": {"const": "e"}}, ["id", "cat", "bp"]),
                ]
            },
        },
    },
}
"""What of the Trace Event Format (Google, 2016) is used: complete events, metadata, counters and flows."""


def read(path: Path) -> list[dict[str, Any]]:
    """Read a trace that is valid by the schema, whose slices nest in every lane and whose arrows have two ends."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(content)
    jsonschema.validate(trace, SCHEMA)
    events: list[dict[str, Any]] = trace["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, "a slice begins in another one and ends behind it"
            open_ends.append(end)
    heads = {event["id"]: event for event in events if event["ph"] == "s"}
    tails = {event["id"]: event for event in events if event["ph"] == "f"}
    assert heads.keys() == tails.keys()
    assert all(heads[name]["ts"] <= tails[name]["ts"] for name in heads)
    return events


def test_every_rank_is_a_process_with_its_lanes(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, pipeline=2)
    run.add(40)
    record = RunRecord(run.folder)
    summary = write_trace(record, tmp_path / "trace.json.gz", first=20, last=30)
    assert (summary.steps, summary.num_ranks, summary.left_out) == ((20, 30), 4, 0)
    events = read(tmp_path / "trace.json.gz")
    assert len(events) == summary.num_events
    named = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert named["process_name", 3, 0] == {"name": "rank 3 · pipeline 1, data 1 · host-1"}
    assert [named["process_sort_index", rank, 0]["sort_index"] for rank in range(4)] == [0, 1, 2, 3]
    assert {args["name"] for (name, pid, _), args in named.items() if (name, pid) == ("thread_name", 0)} == {
        "compute", "data axis", "waits",
    }  # fmt: skip
    forwards = [event for event in events if event["ph"] == "X" and event["name"] == "forward 2" and event["pid"] == 1]
    assert [event["dur"] for event in forwards] == [4000.0, 4000.0]
    assert forwards[0]["args"] == {"stage": 0, "microbatch": 2, "on a processor, µs": 3900}
    sent = [event for event in events if event.get("cat") == "communication"]
    assert sent[0]["args"] == {"axis": "data", "bytes": 8_000_000}
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 2 * 4
    assert all(20 < event["args"]["held"] < 22 for event in counters)


def test_arrows_follow_a_microbatch_through_the_stages(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, pipeline=3)
    run.add(10)
    write_trace(RunRecord(run.folder), tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    arrows = [event for event in events if event["ph"] in "sf"]
    forward = [(event["pid"], event["ph"]) for event in arrows if event["id"].split(".")[2].startswith("f0")]
    # Ranks 0 and 1 are the first stage, 2 and 3 the second, 4 and 5 the third.
    assert sorted(forward) == [(0, "s"), (1, "s"), (2, "f"), (2, "s"), (3, "f"), (3, "s"), (4, "f"), (5, "f")]
    assert {event["tid"] for event in arrows} == {COMPUTE}


def test_what_overlaps_gets_lanes_of_its_own(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2)
    run.add(5)
    draw = np.random.default_rng(3)
    spans = np.array([(0, -1, -1, 10**9, 10**8, -1)], SPAN)
    rows = [(1, 2, 8, 10**9 + int(at), 10**9 + int(at + long), 10**9 + int(at), int(long) // 2)
            for at, long in draw.integers(1, 10**8, (60, 2))]  # fmt: skip
    run.writer.detail(1, 5, StepDetail(0, ("forward", "data", "all_reduce"), spans, np.array(rows, COLLECTIVE)))
    write_trace(RunRecord(run.folder), tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    assert len([event for event in events if event.get("cat") == "communication"]) == 60
    titles = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"data axis", "data axis, 2", "waits, 2"} <= titles
    assert len(titles) <= 1 + 2 * 10


def test_clocks_of_hosts_are_brought_together(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2)
    run.add(8)
    for step in (6, 7, 8):
        for rank, ahead in ((0, 0), (1, 7_000_000_000)):  # the clock of the second host is 7 s ahead
            spans = np.array([(0, -1, -1, step * 10**8 + ahead, 10**7, -1)], SPAN)
            run.writer.detail(1, step, StepDetail(rank, ("forward",), spans, np.zeros(0, COLLECTIVE)))
    write_trace(RunRecord(run.folder), tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    begins = {event["pid"]: event["ts"] for event in events if event["ph"] == "X" and event["name"] == "forward"}
    assert abs(begins[0] - begins[1]) < 1000  # they began within 0.1 ms of one another by the collector


def test_a_long_run_is_cut_to_the_newest_steps(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run")
    run.add(100)
    record = RunRecord(run.folder)
    summary = write_trace(record, tmp_path / "trace.json", most=320)
    assert summary.steps == (80, 90, 100)
    assert summary.left_out == 7
    assert len(read(tmp_path / "trace.json")) < 400
    with pytest.raises(LaunchError, match="kept are 10 between 10 and 100"):
        write_trace(record, tmp_path / "none.json", first=101)
    with pytest.raises(LaunchError, match="cannot be written"):
        write_trace(record, tmp_path / "no" / "folder.json")


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeUpRun(folder=tmp_path / "run")
    run.add(30)
    app = build_app()
    output = tmp_path / "t.json.gz"
    command = ["trace", str(run.folder), "-o", str(output), "--steps"]
    app([*command, "15.."], exit_on_error=False, result_action="return_value")
    assert "4 ranks in 2 kept steps (steps 20 to 30)" in capsys.readouterr().out
    assert read(output)
    with pytest.raises(LaunchError, match=r"write 3\.\.9"):
        app([*command, "9..3"], exit_on_error=False, result_action="return_value")
    with pytest.raises(LaunchError, match="no range"):
        app([*command, "all"], exit_on_error=False, result_action="return_value")
