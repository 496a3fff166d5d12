"""What it costs to record where the time of a step goes: the same training with and without it, in one process.

Blocks of steps alternate, and pairs of them begin with either.  In one block of a pair the ring takes nothing; in the
other it takes spans, actions and steps.  Behind that block a collector reads it and writes the telemetry, in the
supervisor's place: its time is a figure of its own, seconds of a processor per second of the run.
"""

from __future__ import annotations

import os
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._llama import pool_of, shape_of
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import median_interval, spread
from benchmarks._weft import LEARNING_RATE, plan_of, recipe_of
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.events.ring import RankRing, StepScalars, ring_path
from weft.model.reference.decoder import build_decoder
from weft.run.engine import create_training
from weft.watch.collector import Collector

SIZES: dict[str, dict[str, int]] = {
    "short steps": {
        "batch": 2, "num_layers": 2, "hidden_size": 128, "ffn_size": 256, "num_heads": 4, "sequence_length": 64,
    },
    "longer steps": {"batch": 1, "sequence_length": 128},
}  # fmt: skip
_SCALARS = StepScalars(1.0, 1.0, LEARNING_RATE, 1.0, 64.0, skipped=False)


class Deaf:
    """Stands in the place of a ring's methods: it takes everything and records nothing."""

    NAMES = ("span", "set_open", "step")

    def __init__(self, ring: RankRing) -> None:
        self._ring, self._kept = ring, {name: getattr(ring, name) for name in self.NAMES}

    def switch(self, *, on: bool) -> None:
        for name, method in self._kept.items():
            object.__setattr__(self._ring, name, method if on else _nothing)


def _nothing(*_: object, **__: object) -> None:
    return None


def blocks(settings: dict[str, Any], rounds: int, steps: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Median seconds of a step with and without recording, by round, and the collector's share of a processor."""
    torch.set_num_threads(1)
    plan = plan_of(settings)
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name) / "1", Path(name) / "run"
        folder.mkdir()
        run.mkdir()
        recorder = Recorder(ring=RankRing.create(ring_path(folder, 0), 0))
        mesh = Mesh(plan.mesh, torch.device("cpu"))
        training = create_training(recipe_of(settings, plan), plan, build_decoder(shape_of(settings)), mesh, recorder)
        pool, deaf, number = pool_of(settings), Deaf(recorder.ring), 0
        collector = Collector(lambda: run, Path(name))

        def take() -> float:
            nonlocal number
            began = time.perf_counter()
            recorder.begin_ring_step()
            training.stepper([pool[number % len(pool)]], step=number, learning_rate=LEARNING_RATE)
            number += 1
            recorder.end_ring_step(number, 1 << 20, _SCALARS)
            return time.perf_counter() - began

        for _ in range(20):
            take()
        pairs: list[tuple[float, float]] = []
        collecting: list[float] = []
        for index in range(rounds):
            seconds: dict[bool, float] = {}
            for on in (True, False) if index % 2 else (False, True):
                deaf.switch(on=on)
                seconds[on] = median(take() for _ in range(steps))
                if on:
                    began = time.thread_time()
                    collector.poll()
                    collecting.append((time.thread_time() - began) / (steps * seconds[on]))
            pairs.append((seconds[True], seconds[False]))
        collector.close()
    return pairs, collecting


def nanoseconds(what: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(what, number=number, repeat=50)) / number * 1e9


def singles() -> dict[str, float]:
    """Nanoseconds of one span, one action, and one collective with its wait, clocks included."""
    recorder = Recorder()

    def span() -> None:
        with recorder.span("optimizer"):
            pass

    def action() -> None:
        with recorder.action("forward", 1, 0):
            pass

    def collective() -> None:
        seen = TraceEvent("data", "all_reduce", 100)
        recorder.collectives.add(seen)
        seen.exit_wait(seen.enter_wait())

    return {
        "span": nanoseconds(span, 2_000),
        "action": nanoseconds(action, 2_000),
        "collective": nanoseconds(collective, 500),
    }


def main() -> None:
    options = options_parser(__doc__, rounds=60).parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1")  # where contenders find their places
    before, goals, samples = machine(), list[Goal](), dict[str, Any]()
    for name, nanos in singles().items():
        goals.append(Goal(what=f"one {name}", measured=nanos / 1e3, goal=1.0 if name != "collective" else 3.0,
                          better="lower", unit="µs"))  # fmt: skip
        samples[name] = nanos
        log(f"one {name}: {nanos / 1e3:.2f} µs")
    for name, settings in SIZES.items():
        pairs, collecting = blocks({"fused_loss": False, **settings}, options.rounds, 20)
        extra = [100 * (on / off - 1) for on, off in pairs]
        low, high = median_interval(extra)
        step = median(off for _, off in pairs)
        goals.append(Goal(what=f"recording, {name}, median", measured=median(extra), goal=0.5, better="lower",
                          spread=spread(extra), unit="%"))  # fmt: skip
        goals.append(
            Goal(what=f"recording, {name}, upper 95 % bound", measured=high, goal=1.0, better="lower", unit="%")
        )
        shares = [100 * share for share in collecting]
        what = f"collector of one rank, {name}, share of a processor"
        goals.append(
            Goal(what=what, measured=median(shares), goal=1.0, better="lower", spread=spread(shares), unit="%")
        )
        samples[name] = {"pairs": pairs, "collecting": collecting}
        log(
            f"{name}: {step * 1e3:.1f} ms, {median(extra):+.2f} % (95 %: {low:+.2f} to {high:+.2f}), collector"
            f" {median(shares):.2f} % of a processor"
        )
    about = {"machine": before, "versions": versions(), "settings": SIZES, "note": options.note}
    write_result("recording", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
