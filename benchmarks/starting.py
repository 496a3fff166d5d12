"""Processor time until Weft answers, and of the small calls of which a search makes thousands.

Each start is a process of its own.  Beside them, in the same rounds, stand imports of numpy and of torch: what the
machine and its other work do to an import, they do to all.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread, summary
from weft.config.cluster import parse_cluster_spec
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel, Memories
from weft.techniques.cost_terms import Layout, Network

_TIMED = "import {before}, time; start = time.process_time(); import {timed}; print(time.process_time() - start)"

STARTS: tuple[tuple[str, list[str], float | None], ...] = (
    ("import numpy", ["-c", _TIMED.format(before="sys", timed="numpy")], None),
    ("import torch", ["-c", _TIMED.format(before="sys", timed="torch, torch.distributed")], None),
    ("weft --help", [str(Path(sys.executable).with_name("weft")), "--help"], 0.3),
    ("import weft, after torch", ["-c", _TIMED.format(before="torch, torch.distributed", timed="weft")], 0.2),
    *(
        (f"import {names}", ["-c", _TIMED.format(before="sys", timed=names)], goal)
        for names, goal in (
            ("weft.config.recipe, weft.config.cluster, weft.config.plan", 0.1),
            ("weft.planning.search", 0.3),
            ("weft.planning.explain", 0.3),
            ("weft.verify.program", 0.3),
        )
    ),
)
"""What, the command, and the seconds that are hoped for on a desktop of 2024."""


def start_seconds(command: list[str]) -> float:
    """Return what the command prints, or else the processor time of its process, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if command[0] == "-c":
        return float(told)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def small_calls() -> list[tuple[str, Callable[[], object], float]]:
    """Return what, the call, and the seconds that are hoped for, once what layouts share is known."""
    large = profile_of_sizes(known_model("llama-3.1-405b").sizes)
    layout = Layout(pipeline=16, tensor=8, shard=128, zero=1, sequence_parallel=True, microbatches=16)
    memories, network = Memories(large), Network(parse_cluster_spec("1389x72xgb200"))
    costs = CostModel(large, parse_cluster_spec("2048x8xh100"))
    others = iter(range(17, 1_000_000))
    return [
        ("memory of a layout", lambda: memories.fullest(layout), 2e-4),
        ("time of a layout", lambda: costs.time(replace(layout, microbatches=next(others))), 1e-3),
        ("groups of 100,008 devices", lambda: network.groups(Layout(pipeline=4, tensor=6, replicate=4_167)), 1e-4),
    ]


def call_seconds(call: Callable[[], object], times: int = 100) -> float:
    call()
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times


def main() -> None:
    options = options_parser(__doc__, rounds=7).parse_args()
    before = machine()
    samples: dict[str, list[float]] = {}
    calls = small_calls()
    for _ in range(options.rounds):
        for what, command, _ in STARTS:
            samples.setdefault(what, []).append(start_seconds(command))
        for what, call, _ in calls:
            samples.setdefault(what, []).append(call_seconds(call))
    hoped = [(what, goal) for what, _, goal in (*STARTS, *calls) if goal is not None]
    goals = [
        Goal(what=f"{what}, processor time", measured=1e3 * median(samples[what]), goal=1e3 * goal, better="lower",
             spread=spread([1e3 * each for each in samples[what]]), unit=" ms")
        for what, goal in hoped
    ]  # fmt: skip
    medians: dict[str, Any] = {what: summary(found) for what, found in samples.items()}
    for what, found in samples.items():
        log(f"{what}: {1e3 * median(found):.3f} ms")
    about = {"machine": before, "versions": versions(), "medians": medians, "note": options.note}
    write_result("starting", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
