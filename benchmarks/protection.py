"""What all protection against failures costs a training in which nothing fails.

`weft train` at its default settings (a supervisor that watches for hangs, stragglers and loss spikes, snapshots in
memory, ranks compared before each) takes turns with the same recipe under torchrun, where it has none of this.  Two
ranks; a block is a whole run of each, of which the first steps are left out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from benchmarks._job import WeftTrainJob
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import spread

WARM_STEPS, STEPS = 20, 170
_RECIPE = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = 128
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 64
[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0
[batch]
global_batch_size = 8
[run]
steps = 100000
"""
_PLAN = "[mesh]\nreplicate = 2\n[microbatch]\nsize = 4\n"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")


def times_between_steps(folder: Path, *, protected: bool) -> list[float]:
    with WeftTrainJob(folder, _RECIPE, _PLAN, before=() if protected else _TORCHRUN) as job:
        job.wait_for_step(STEPS, seconds=300)
        ends = [at for step, at in job.steps() if WARM_STEPS <= step <= STEPS]
    return [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]


def main() -> None:
    parser = options_parser(__doc__, rounds=6)
    options = parser.parse_args()
    before = machine()
    samples: dict[str, list[float]] = {}
    for number in range(options.rounds):
        names = ("protected", "bare") if number % 2 else ("bare", "protected")
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                times = times_between_steps(Path(folder), protected=name == "protected")
            samples.setdefault(f"{name}: median step", []).append(median(times))
            samples.setdefault(f"{name}: mean step", []).append(mean(times))
            log(f"round {number + 1}: {name}: {1000 * median(times):.1f} ms, mean {1000 * mean(times):.1f} ms")
        log(f"load {os.getloadavg()[0]:.1f}")
    goals: list[Goal] = []
    for what in ("median step", "mean step"):
        pairs = zip(samples[f"protected: {what}"], samples[f"bare: {what}"], strict=True)
        costs = [100 * (with_all / without - 1) for with_all, without in pairs]
        goals.append(
            Goal(
                what=f"cost of all protection, of the {what}",
                measured=median(costs),
                goal=2.0,
                better="lower",
                spread=spread(costs),
                unit=" %",
            )
        )
    settings = {"recipe": _RECIPE, "plan": _PLAN, "steps": STEPS - WARM_STEPS}
    about = {"machine": before, "versions": versions(), "settings": settings, "note": options.note}
    write_result("protection", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
