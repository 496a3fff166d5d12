"""Seconds of one core and memory that the planner takes for large clusters, each search in a process of its own.

Seconds are processor time of the whole search, imports left out.  Beside them stands how long a fixed loop took before
and after: what other work does to a shared core, it does to both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread, summary
from weft.config.cluster import parse_cluster_spec
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.search import search

CASES: tuple[tuple[str, str, int, float | None], ...] = (
    ("llama-3.1-405b", "2048x8xh100", 2048, 5.0),
    ("llama-3.1-70b", "48x8xa100-80gb", 1536, None),
    ("deepseek-v3", "256x8xh100", 15360, None),
    ("moe-1t", "12500x8xh100", 12288, 90.0),
)
"""Model, cluster, batch, and the seconds that are hoped for."""


def measure(model: str, cluster: str, batch: int) -> dict[str, Any]:
    """Search once, in this process."""
    profile, devices = profile_of_sizes(known_model(model).sizes), parse_cluster_spec(cluster)
    before = _loop_seconds()
    start = time.process_time()
    found = search(profile, devices, global_batch_size=batch)
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "loop_seconds": (before + _loop_seconds()) / 2,
        "bytes": _peak_bytes(),
        "score": found.best[0].score,
        "layouts": found.counts.searched,
    }


def _peak_bytes() -> int:
    """Of this address space: what `getrusage` says includes the parent's before the exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _loop_seconds() -> float:
    start = time.process_time()
    sum(number * number for number in range(1_000_000))
    return time.process_time() - start


def main() -> None:
    parser = options_parser(__doc__, rounds=3)
    parser.add_argument("--case", help="measure one case here, and print it as JSON")
    options = parser.parse_args()
    if options.case is not None:
        model, cluster, batch = options.case.split()
        print(json.dumps(measure(model, cluster, int(batch))))
        return
    before = machine()
    samples: dict[str, Any] = {}
    for turn in range(options.rounds):
        for model, cluster, batch, _ in CASES:
            command = [sys.executable, "-m", "benchmarks.search", "--case", f"{model} {cluster} {batch}"]
            told = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
            samples.setdefault(f"{model} on {cluster}", []).append(told)
            log(f"{turn}: {model} on {cluster}: {told['seconds']:.1f} s, {told['bytes'] / 1e9:.2f} GB")
    goals = [
        Goal(
            what=f"search for {model} on {cluster}, processor time",
            measured=median(seconds),
            goal=goal,
            better="lower",
            spread=spread(seconds),
            unit=" s",
        )
        for model, cluster, _, goal in CASES
        if goal is not None and (seconds := [each["seconds"] for each in samples[f"{model} on {cluster}"]])
    ]
    medians = {name: summary([each["seconds"] for each in found]) for name, found in samples.items()}
    about = {"machine": before, "versions": versions(), "medians": medians, "note": options.note}
    write_result("search", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
