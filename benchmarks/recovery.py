"""From a killed rank to the next step: `weft train` on two ranks of one host.

A run of a small model saves every 20 steps, and a rank is killed between two saves.  What is measured is the time from
the kill to the end of the first step after it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread

SAVE_EVERY, KILL_AFTER, STEPS = 20, 50, 100_000
_DEADLINE_SECONDS = 120.0
_RECIPE = f"""
[model]
reference = "mlp"
num_layers = 2
input_size = 128
hidden_size = 128
num_classes = 8
[data]
train = [{{ source = "synthetic" }}]
validation_fraction = 0.0
[batch]
global_batch_size = 32
[run]
steps = {STEPS}
save_every = {SAVE_EVERY}
[run.on_failure]
max_restarts = 100
"""
_PLAN = "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 0\n[microbatch]\nsize = 16\n"


StepTimes = list[tuple[int, float]]
"""Steps in the order in which they were finished, each with its time in seconds."""


def recover(command: list[str], steps_of: Callable[[], StepTimes], ranks: Callable[[], list[int]]) -> float:
    """Seconds from a kill to the first step after it."""
    quiet = subprocess.DEVNULL
    job = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        _wait(lambda: any(step >= KILL_AFTER for step, _ in steps_of()))
        victim = random.choice(ranks())
        killed, before = time.time(), len(steps_of())
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.02)  # a step that was under way may still be written down
        before = max(before, len([1 for _, at in steps_of() if at <= killed + 0.02]))
        # The first step of the new ranks has a number that was there before.
        _wait(lambda: any(step <= steps_of()[before - 1][0] for step, _ in steps_of()[before:]))
        return next(at for step, at in steps_of()[before:] if step <= steps_of()[before - 1][0]) - killed
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def weft_seconds(folder: Path) -> float:
    """Time of `weft train`."""
    (folder / "recipe.toml").write_text(_RECIPE)
    (folder / "plan.toml").write_text(_PLAN)
    metrics = folder / "run" / "metrics.jsonl"
    command = [str(Path(sys.executable).with_name("weft")), "train", str(folder / "recipe.toml"), "--plan"]
    command += [str(folder / "plan.toml"), "--run-folder", str(folder / "run"), "--prove", "never"]

    def steps() -> StepTimes:
        lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(event["step"], event["unix_time_seconds"]) for event in events if event["kind"] == "step"]

    def ranks() -> list[int]:
        owner = json.loads((folder / "run" / "owner.json").read_text())["pid"]
        parents = [child for server in _children(owner) for child in _children(server)]
        return [rank for parent in parents for rank in _children(parent)]

    return recover(command, steps, ranks)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the job has not come so far")
        time.sleep(0.01)


def main() -> None:
    parser = options_parser(__doc__, rounds=6)
    options = parser.parse_args()
    before = machine()
    random.seed(0)
    samples: dict[str, list[float]] = {"weft train": []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            samples["weft train"].append(weft_seconds(Path(folder)))
        log(f"round {number + 1}: {samples['weft train'][-1]:.2f} s")
    goals = [
        Goal(
            what="killed rank to the end of the next step, weft train",
            measured=median(samples["weft train"]),
            goal=1.0,
            better="lower",
            spread=spread(samples["weft train"]),
            unit=" s",
        ),
    ]
    about = {"machine": before, "versions": versions(), "settings": {"save_every": SAVE_EVERY}, "note": options.note}
    write_result("recovery", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
