"""What a save costs training: 0.9 GB of state on two ranks, by `weft train` and by torch's distributed checkpoints.

`weft train` saves into memory, and copies to the disk beside training; under torchrun it waits for the disk, as the
peer does (`dcp.save`).  `dcp.async_save` copies the state before it writes beside training, and waits there for the
save before.  What is measured is the time that training waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread

STEPS, SAVE_EVERY = 25, 6
"""The fourth save, and the one at the end, which goes to the disk at once, are not counted."""
_RECIPE = f"""
[model]
reference = "mlp"
num_layers = 2
input_size = 2048
hidden_size = 2048
num_classes = 8
[data]
train = [{{ source = "synthetic" }}]
validation_fraction = 0.0
[batch]
global_batch_size = 16
[run]
steps = {STEPS}
save_every = {SAVE_EVERY}
"""
_PLAN = "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 1\n[microbatch]\nsize = 8\n"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def weft_times(folder: Path, *, at_once: bool) -> dict[str, list[float]]:
    """Seconds that training waited for saves, that copies took, and that steps took."""
    (folder / "recipe.toml").write_text(_RECIPE)
    (folder / "plan.toml").write_text(_PLAN)
    weft = str(Path(sys.executable).with_name("weft"))
    command = [*_TORCHRUN, "--no-python", weft] if at_once else [weft]
    command += ["train", str(folder / "recipe.toml"), "--plan", str(folder / "plan.toml"), "--prove", "never"]
    _run([*command, "--run-folder", str(folder / "run")])
    events: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    saves = [event for event in events if event["kind"] == "checkpoint"][:3]
    steps = [event["step_seconds"] for event in events if event["kind"] == "step"]
    return {
        "stalls": [save["seconds"] for save in saves],
        "copies": [save["copy_seconds"] for save in saves],
        "steps": steps,
    }


def peer_times(folder: Path, deed: str) -> dict[str, list[float]]:
    """Times of the peer, which saves by `save` or by `async_save`."""
    _run([*_TORCHRUN, "-m", "benchmarks._saves_peer", str(folder), str(STEPS), str(SAVE_EVERY), deed])
    times = json.loads((folder / "times.json").read_text())
    return {"stalls": times["stalls"][:3], "steps": times["steps"]}


def disk_bandwidth(folder: Path) -> float:
    """Bytes per second that reach the disk of a folder, by one writer of 1 GB."""
    block, count = os.urandom(8 << 20), 128
    began = time.perf_counter()
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
    return len(block) * count / (time.perf_counter() - began)


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> None:
    parser = options_parser(__doc__, rounds=3)
    options = parser.parse_args()
    before = machine()
    samples: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name in ("weft train", "weft train, at once", "dcp.save", "dcp.async_save"):
            with tempfile.TemporaryDirectory(dir=ROOT) as folder:
                if name.startswith("weft"):
                    times = weft_times(Path(folder), at_once=name.endswith("at once"))
                else:
                    times = peer_times(Path(folder), name.removeprefix("dcp."))
            for what, seconds in times.items():
                samples.setdefault(f"{name}: {what}", []).extend(seconds)
            log(
                f"round {number + 1}: {name} waits {median(times['stalls']):.2f} s, step {median(times['steps']):.2f} s"
            )
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            samples.setdefault("disk, bytes per second", []).append(disk_bandwidth(Path(folder)))
    stall = samples["weft train: stalls"]
    copied = [0.86e9 / seconds for seconds in samples["weft train: copies"] if seconds]
    goals = [
        Goal(
            what="wait for a save of 0.9 GB",
            measured=median(stall),
            goal=0.5,
            better="lower",
            spread=spread(stall),
            unit=" s",
        ),
        Goal(
            what="share of the disk's bandwidth that a copy reaches",
            measured=median(copied) / median(samples["disk, bytes per second"]),
            goal=0.8,
            better="higher",
        ),
        *(
            Goal(
                what=f"wait for a save, relative to {peer}",
                measured=median(stall) / median(samples[f"{peer}: stalls"]),
                goal=1.0,
                better="lower",
            )
            for peer in ("dcp.save", "dcp.async_save")
        ),
    ]
    about = {"machine": before, "versions": versions(), "settings": {"save_every": SAVE_EVERY}, "note": options.note}
    write_result("saves", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
