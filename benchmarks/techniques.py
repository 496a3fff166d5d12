"""What single techniques promise, each in fresh processes: recomputation, bf16, prefetch, bucket size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import round_ratios, spread
from weft.config.plan import MicrobatchPlan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.reference.decoder import build_decoder
from weft.run.data import BatchSource, data_shape, open_data
from weft.run.data._reader import TrainReader

_WEFT = "benchmarks._weft:weft"


def _seconds(entries: Sequence[Entry], *, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Per entry, seconds per step of every round, and peak resident bytes."""
    with contenders(entries, warmup_steps=2) as alive:
        blocks = interleave(alive, rounds=rounds, steps=steps)
    return (
        {name: [median(block.seconds) for block in found] for name, found in blocks.items()},
        {name: max(block.peak_bytes for block in found) for name, found in blocks.items()},
    )


# ── recomputation and the fused loss ──────────────────────────────────────────────────────────────────────────────────


def recompute(rounds: int) -> tuple[list[Goal], dict[str, Any]]:
    """Peak resident memory and time at sequence 1,024; the peak is the process's, interpreter and torch included."""
    common = {"sequence_length": 1024, "batch": 8, "zero": 0, "threads": 2}
    plain = Entry(name="kept", target=_WEFT, settings={**common, "fused_loss": False}, ranks=1)
    fused = Entry(name="fused loss", target=_WEFT, settings={**common}, ranks=1)
    both = Entry(name="recompute and fused loss", target=_WEFT, settings={**common, "recompute": "full"}, ranks=1)
    some = Entry(
        name="recompute of four blocks in six and fused loss",
        target=_WEFT,
        settings={**common, "recompute": ["full"] * 4 + ["none"] * 2},
        ranks=1,
    )
    seconds, peaks = _seconds([plain, fused, both, some], rounds=rounds, steps=1)
    saved = (1 - peaks[both.name] / peaks[plain.name]) * 100
    more = [(ratio - 1) * 100 for ratio in round_ratios(seconds[both.name], seconds[plain.name])]
    goals = [
        Goal(what="peak memory saved by recompute and fused loss", measured=saved, goal=40, better="higher", unit=" %"),
        Goal(
            what="time added by recompute and fused loss",
            measured=median(more),
            goal=25,
            better="lower",
            spread=spread(more),
            unit=" %",
        ),
    ]
    return goals, {"seconds": seconds, "peak_mib": {name: round(peak / 2**20) for name, peak in peaks.items()}}


# ── bf16 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bf16(rounds: int) -> tuple[list[Goal], dict[str, Any]]:
    """One process at hidden 2,048."""
    common = {
        "num_layers": 2,
        "hidden_size": 2048,
        "num_heads": 16,
        "ffn_size": 5632,
        "batch": 4,
        "zero": 0,
        "threads": 2,
    }
    wide = Entry(name="fp32", target=_WEFT, settings=common, ranks=1)
    narrow = Entry(name="bf16", target=_WEFT, settings={**common, "precision": "bf16"}, ranks=1)
    seconds, _ = _seconds([wide, narrow], rounds=rounds, steps=1)
    gains = round_ratios(seconds[wide.name], seconds[narrow.name])
    goal = Goal(
        what="bf16 over fp32 at hidden 2048",
        measured=median(gains),
        goal=2.0,
        better="higher",
        spread=spread(gains),
        unit="x",
    )
    return [goal], {"seconds": seconds}


# ── prefetch ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def loading(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender that reads a batch per step, or not, and then sleeps as long as an accelerator might compute.

    The source is slow because its storage is: every batch takes 0.1 s longer to read.
    """
    read: Any = TrainReader.read

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.1)
        return read(*arguments)

    TrainReader.read = read_slowly
    workers, compute_seconds = settings["workers"], float(settings["compute_seconds"])
    source = None if workers is None else _slow_source(int(workers), int(settings["sequence_length"]))
    held: list[Any] = []

    def step(index: int) -> float:
        if source is not None:
            held[:] = source.microbatches(index)
        time.sleep(compute_seconds)
        return 0.0

    return step


def _slow_source(workers: int, length: int) -> BatchSource:
    shape = DecoderShape(num_layers=1, hidden_size=8, num_heads=1, vocabulary_size=8192, sequence_length=length)
    recipe = Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        data=DataRecipe(train=(DataSource(source="synthetic"),), prefetch_workers=workers),
        batch=BatchRecipe(global_batch_size=32),
        run=RunRecipe(steps=1),
    )
    blueprint = build_decoder(shape)
    return open_data(recipe, data_shape(blueprint, recipe), microbatch=MicrobatchPlan(size=32, per_step=1))


def prefetch(rounds: int) -> tuple[list[Goal], dict[str, Any]]:
    """Without a loader, with a loader that the step waits for, and with one thread that reads ahead."""
    common = {"sequence_length": 1024, "compute_seconds": 0.15}
    none, inline, helped = (
        Entry(name=name, target="benchmarks.techniques:loading", settings={**common, "workers": workers}, ranks=1)
        for name, workers in (("no loader", None), ("read in the rank", 0), ("one prefetch worker", 1))
    )
    seconds, _ = _seconds([none, inline, helped], rounds=rounds, steps=10)
    recovered = [
        (slow - fast) / (slow - bare) * 100
        for bare, slow, fast in zip(seconds[none.name], seconds[inline.name], seconds[helped.name], strict=True)
    ]
    goal = Goal(
        what="of a slow loader's cost recovered by prefetch",
        measured=median(recovered),
        goal=90,
        better="higher",
        spread=spread(recovered),
        unit=" %",
    )
    return [goal], {"seconds": seconds}


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def buckets(rounds: int) -> tuple[list[Goal], dict[str, Any]]:
    """Seconds per step over the bucket size, 115 MB of gradients between two ranks; no goal, a plot."""
    common = {"hidden_size": 512, "ffn_size": 1536, "batch": 2, "sequence_length": 128, "zero": 1}
    entries = [
        Entry(
            name=str(size), target=_WEFT, settings={**common, "bucket_bytes": size << 20, "first_bucket_bytes": 1 << 20}
        )
        for size in (1, 4, 10, 25, 50, 100)
    ]
    seconds, _ = _seconds(entries, rounds=rounds, steps=2)
    for size, found in seconds.items():
        log(f"buckets of {size} MiB: {median(found):.3f} s")
    return [], {"seconds_by_bucket_mib": seconds}


def main() -> None:
    parser = options_parser(__doc__, rounds=7)
    parser.add_argument("--only", choices=("recompute", "bf16", "prefetch", "buckets"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    for measure in (recompute, bf16, prefetch, buckets):
        if options.only in (None, measure.__name__):
            found, samples[measure.__name__] = measure(options.rounds)
            goals += found
    about = {"machine": before, "versions": versions(), "note": options.note}
    write_result("techniques", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
