"""Useful time of a training in which a rank is killed each minute, with steps of one second.

`weft train` on two ranks with its default settings: nothing is said of saves.  A step is useful where it was not done
again after a failure.  Goodput is the time that the useful steps take without a fault, as the median step does, over
the time that has passed from the end of the first step to that of the last one.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._job import WeftTrainJob
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result

STEP_SECONDS, FAULT_EVERY_SECONDS, WIDTH, BLOCKS = 1.0, 60.0, 1024, 8
_RECIPE = f"""
[model]
factory = "benchmarks._patient:build"
arguments = {{{{ seconds = {STEP_SECONDS}, width = {WIDTH}, blocks = {BLOCKS} }}}}
sequence_length = 16
loss = "tokens"
propose_split = false
[data]
train = [{{{{ source = "{{corpus}}" }}}}]
cache = "{{cache}}"
validation_fraction = 0.0
[batch]
global_batch_size = 8
[optimizer]
learning_rate = 1e-3
[run]
steps = 100000
"""
_PLAN = "[mesh]\nreplicate = 2\n[microbatch]\nsize = 4\n"


def write_corpus(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(6):
        lines = (f"text {number} says {line * number % 97}\n" for line in range(200))
        (corpus / f"{number}.txt").write_text("".join(lines))
    return corpus


def disturbed(folder: Path, num_faults: int) -> tuple[list[tuple[int, float]], list[dict[str, Any]], list[float]]:
    """Steps in the order in which they were done, generations, and times of the kills: one a minute, at a drawn
    moment of it."""
    recipe = _RECIPE.format(corpus=write_corpus(folder), cache=folder / "cache")
    kills: list[float] = []
    with WeftTrainJob(folder, recipe, _PLAN) as job:
        job.wait_for_step(1)
        begun = job.steps()[0][1]
        for minute in range(num_faults):
            moment = begun + (minute + random.uniform(0.1, 0.9)) * FAULT_EVERY_SECONDS
            time.sleep(max(0.0, moment - time.time()))
            kills.append(time.time())
            os.kill(random.choice(job.ranks()), signal.SIGKILL)
            log(f"minute {minute + 1}: rank killed after step {job.steps()[-1][0]}")
        time.sleep(max(0.0, begun + num_faults * FAULT_EVERY_SECONDS - time.time()))
        return job.steps(), job.events("generation"), kills


def goals_of(steps: list[int], apart: list[float]) -> list[Goal]:
    """Goodput of the whole run, and of all after two minutes, when it has seen two failures.

    Args:
        steps: numbers of the steps in the order in which they were done.
        apart: seconds from each step to the next.
    """
    two_minutes = next(at for at in range(len(apart)) if sum(apart[:at]) >= 2 * FAULT_EVERY_SECONDS)
    what = "goodput with a rank killed each minute and steps of one second"
    return [
        Goal(
            what=name,
            measured=(steps[-1] - max(steps[: begun + 1])) * median(apart) / sum(apart[begun:]),
            goal=0.8,
            better="higher",
        )
        for name, begun in ((what, 0), (f"{what}, after the first two minutes", two_minutes))
    ]


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--minutes", type=int, default=6, help="each has a fault")
    options = parser.parse_args()
    before = machine()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        steps, generations, kills = disturbed(Path(folder), options.minutes)
    apart = [later[1] - earlier[1] for earlier, later in zip(steps, steps[1:], strict=False)]
    numbers = [step for step, _ in steps]
    log(f"{numbers[-1] - numbers[0]} useful steps of {len(apart)} in {sum(apart):.0f} s")
    samples = {
        "seconds between steps": apart,
        "steps": numbers,
        "seconds from a kill to the end of the next step": [
            next(at for _, at in steps if at > kill + 0.05) - kill for kill in kills if kill < steps[-1][1] - 0.05
        ],
        "steps that were done again": [each["failed_step"] - each["restored_step"] - 1 for each in generations],
    }
    settings = {
        "step_seconds": STEP_SECONDS,
        "faults": options.minutes,
        "parameters": (2 * 300 + BLOCKS * WIDTH) * WIDTH,
    }
    about = {"machine": before, "versions": versions(), "settings": settings, "note": options.note}
    write_result("goodput", goals=goals_of(numbers, apart), samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
