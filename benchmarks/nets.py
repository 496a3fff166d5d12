"""What it costs that nothing is silent: the proof at the start, and the nets that watch while a session runs.

The proof: seconds of `weft train` on the demo's recipe and of `session.prepare` on a model of 10 M parameters, beside
the same without it.  The nets: steps of about 5 ms of a session with them beside one without, interleaved.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import median_interval, spread

_SMALL = {"blocks": 24, "batch": 32}
"""Steps of about 5 ms on one core of a Xeon, 148 tensors."""
_TEN_MILLION = {"blocks": 9, "batch": 32, "width": 512}
_PREPARE = """
import sys, tempfile, time
import torch, weft
from benchmarks._nets import data_of, loss_of, model_of
settings = {settings!r}
model = model_of(settings)
print(sum(p.numel() for p in model.parameters()))
with weft.session(record=False, folder=tempfile.mkdtemp(), prove={prove!r}, quiet=True) as session:
    start = time.perf_counter()
    session.prepare(model, torch.optim.AdamW(model.parameters()), data_of(settings), loss=loss_of)
    print(time.perf_counter() - start)
"""


def nets(rounds: int, ranks: int) -> tuple[list[float], dict[str, Any]]:
    """Ratios of steps with nets to those without, round by round, and what they are made of."""
    name = "one process" if ranks == 1 else f"{ranks} ranks"
    pair = [
        Entry(name=f"{word} {name}", target="benchmarks._nets:session", settings={**_SMALL, "nets": on}, ranks=ranks)
        for word, on in (("with", True), ("without", False))
    ]
    with contenders(pair, warmup_steps=40) as alive:
        blocks = interleave(alive, rounds=rounds, steps=40)
    seconds = {key: [median(block.seconds) for block in found] for key, found in blocks.items()}
    with_nets, without = (seconds[entry.name] for entry in pair)
    ratios = [a / b for a, b in zip(with_nets, without, strict=True)]
    log(f"{name}: {median(without) * 1e3:.2f} ms without nets, {(median(ratios) - 1) * 100:.2f} % more with them")
    return ratios, {"seconds": seconds, "interval": median_interval(ratios)}


def prepare_seconds(prove: str) -> float:
    """Seconds of `session.prepare` of a model of 10 M parameters."""
    code = _PREPARE.format(settings=_TEN_MILLION, prove=prove)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def demo_seconds(prove: str) -> float:
    """Seconds of a run of the demo that is cut to two steps."""
    demo = ROOT / "examples" / "demo"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("weft")), "train", str(demo / "recipe.toml"), "--plan"]
        command += [str(demo / "plan.toml"), "--run-folder", f"{folder}/run", "--prove", prove]
        command += ["--set", "recipe.run.steps=2", "--set", "recipe.optimizer.warmup_steps=1"]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        taken = time.perf_counter() - start
    line = next((line for line in done.stdout.splitlines() if line.startswith("proof")), "proof     none")
    log(f"demo, {prove}: {taken:.1f} s  {re.sub(r'^proof +', '', line)}")
    return taken


def _more(seconds: Callable[[str], float], rounds: int) -> list[float]:
    """Seconds that a proof adds, round by round."""
    return [seconds("always") - seconds("never") for _ in range(rounds)]


def main() -> None:
    parser = options_parser(__doc__, rounds=30)
    options = parser.parse_args()
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    for ranks in (1, 2):
        ratios, found = nets(options.rounds, ranks)
        samples[f"nets, {ranks} ranks"] = found
        more = [(ratio - 1) * 100 for ratio in ratios]
        what = f"nets in a step of about 5 ms, {ranks} rank{'s' if ranks > 1 else ''}"
        goals.append(Goal(what=what, measured=median(more), goal=1.0, better="lower", spread=spread(more), unit=" %"))
    for what, seconds in (("a session of 10 M parameters", prepare_seconds), ("the demo", demo_seconds)):
        more = _more(seconds, 3)
        samples[f"proof, {what}"] = more
        log(f"proof of {what}: {median(more):.1f} s")
        goals.append(
            Goal(
                what=f"proof of {what}",
                measured=median(more),
                goal=10.0,
                better="lower",
                spread=spread(more),
                unit=" s",
            )
        )
    about = {"machine": before, "versions": versions(), "settings": [_SMALL, _TEN_MILLION], "note": options.note}
    write_result("nets", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
