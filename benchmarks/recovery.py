"""From a fault, or another plan, to the next step: trainings of two ranks on one host.

A run of a small model saves every 20 steps, and a rank is killed between two saves.  What is measured is the time from
the kill to the end of the first step after it: of `weft train`, and of DDP under torchrun, which loads what
`torch.save` has written.  They take turns.  Then a living run is asked to go on under other plans (`weft replan`).
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks._job import TorchrunJob, WatchedJob, WeftTrainJob
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from weft.config.plan import Plan
from weft.events import RunFolder
from weft.run.supervise.replan import ask_for_plan

SAVE_EVERY, KILL_AFTER, STEPS = 20, 50, 100_000
_RECIPE = """
[model]
{model}
[data]
train = [{{ source = "synthetic" }}]
validation_fraction = 0.0
[batch]
global_batch_size = 32
[run]
steps = {steps}
save_every = {save_every}
[run.on_failure]
max_restarts = 100
"""
_PERCEPTRON = 'reference = "mlp"\nnum_layers = 2\ninput_size = 128\nhidden_size = 128\nnum_classes = 8\n'
_DECODER = (
    'reference = "decoder"\nnum_layers = 4\nhidden_size = 48\nnum_heads = 4\nnum_kv_heads = 2\n'
    "vocabulary_size = 300\nsequence_length = 48\n"
)
_PLAN = "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 0\n[microbatch]\nsize = 16\n"
_PLANS = {"tensor 2": Plan.tensor(2), "pipeline 2": Plan.pipeline(2), "data 2": Plan.ddp(replicate=2)}


def weft_job(folder: Path, model: str = _PERCEPTRON) -> WeftTrainJob:
    return WeftTrainJob(folder, _RECIPE.format(model=model, steps=STEPS, save_every=SAVE_EVERY), _PLAN)


def recover(job: WatchedJob) -> float:
    """Seconds from the kill of a rank to the first step after it."""
    with job:
        job.wait_for_step(KILL_AFTER)
        victim = random.choice(job.ranks())
        killed, before = time.time(), len(job.steps())
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.02)  # a step that was under way may still be written down
        before = max(before, len([1 for _, at in job.steps() if at <= killed + 0.02]))
        last = job.steps()[before - 1][0]
        # The first step of the new ranks has a number that was there before.
        job.wait_for(lambda: any(step <= last for step, _ in job.steps()[before:]))
        return next(at for step, at in job.steps()[before:] if step <= last) - killed


def change_plans(folder: Path) -> dict[str, list[float]]:
    """Seconds from asking for a plan to the first step under it, and those in which no step was done."""
    found: dict[str, list[float]] = {"asked": [], "without a step": []}
    with weft_job(folder, _DECODER) as job:
        job.wait_for_step(10)
        for plan in _PLANS.values():
            done, asked = len(job.events("generation")), time.time()
            ask_for_plan(RunFolder(job.run), plan)
            job.wait_for(lambda done=done: len(job.events("generation")) > done)
            begun = job.events("generation")[-1]["unix_time_seconds"]
            job.wait_for(lambda begun=begun: job.steps()[-1][1] > begun)
            times = [at for _, at in job.steps()]
            first = next(at for at in times if at > begun)
            found["asked"].append(first - asked)
            found["without a step"].append(first - max(at for at in times if at <= begun))
            job.wait_for_step(job.steps()[-1][0] + 10)
    return found


def main() -> None:
    parser = options_parser(__doc__, rounds=6)
    options = parser.parse_args()
    before = machine()
    random.seed(0)
    samples: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for name in ("weft train", "torchrun"):
            with tempfile.TemporaryDirectory() as folder:
                arguments = (Path(folder), "benchmarks._recovery_peer", str(SAVE_EVERY))
                seconds = recover(weft_job(Path(folder)) if name == "weft train" else TorchrunJob(*arguments))
            samples.setdefault(name, []).append(seconds)
            log(f"round {number + 1}: {name} goes on after {seconds:.2f} s")
        if number % 2 == 0:  # three changes of plan each
            with tempfile.TemporaryDirectory() as folder:
                for what, times in change_plans(Path(folder)).items():
                    samples.setdefault(f"replan: {what}", []).extend(times)
                    log(f"round {number + 1}: replan, {what}: {' '.join(f'{each:.2f}' for each in times)} s")
    goals = [
        _goal("killed rank to the end of the next step, weft train", samples["weft train"], 1.0),
        _goal("another plan asked for to the end of the first step under it", samples["replan: asked"], 2.0),
        _goal("time without a step while the plan changes", samples["replan: without a step"], 2.0),
        Goal(
            what="killed rank to the end of the next step, relative to torchrun",
            measured=median(samples["weft train"]) / median(samples["torchrun"]),
            goal=1.0,
            better="lower",
        ),
    ]
    settings = {"save_every": SAVE_EVERY, "plans": list(_PLANS)}
    about = {"machine": before, "versions": versions(), "settings": settings, "note": options.note}
    write_result("recovery", goals=goals, samples=samples, about=about, folder=options.folder)


def _goal(what: str, seconds: list[float], limit: float) -> Goal:
    return Goal(what=what, measured=median(seconds), goal=limit, better="lower", spread=spread(seconds), unit=" s")


if __name__ == "__main__":
    main()
