"""Collectives over shared memory beside Gloo and beside what the memory allows, and what that does to a training step.

All ways of a collective run in turn in the same processes.  Bus bandwidth is S/t · 2(n−1)/n for an all-reduce of S
bytes and S/t · (n−1)/n for the other two; the limit drawn in is S/t of a memcpy that all ranks make at once.  A message
goes to and fro between two ranks, and 2S/t is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import round_ratios, spread
from weft.run.launch.launcher import launch_function

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
_STEPS: Mapping[str, Mapping[str, Any]] = {
    "fsdp2 gloo": {"backend": "cpu:gloo", "sharded": True},
    "fsdp2 weft": {"backend": "cpu:weft", "sharded": True},
    "fsdp2 weft, buffers in shared memory": {"backend": "cpu:weft", "sharded": True, "shared_buffers": True},
    "fsdp2, nothing sent": {"backend": "cpu:gloo", "sharded": True, "nothing_sent": True},
    "no communication": {"backend": "cpu:gloo", "sharded": False},
}

Samples = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
"""Collective → way → bytes → seconds of every round."""


def collectives(ranks: int, rounds: int, largest: int) -> tuple[Samples, dict[str, Any]]:
    """Seconds per call on the slowest rank, and how the engine came to copy."""
    arguments = {"sizes": [size for size in SIZES if size <= largest], "rounds": rounds}
    found = launch_function("benchmarks._communication:run_rank", arguments, ranks, threads_per_rank=1)
    samples = {
        collective: {
            way: {size: _slowest([rank["seconds"][collective][way][size] for rank in found]) for size in sizes}
            for way, sizes in ways.items()
        }
        for collective, ways in found[0]["seconds"].items()
    }
    for way, sizes in samples["all_reduce"].items():
        log(f"{ranks} ranks, all-reduce, {way}: " + ", ".join(f"{median(sizes[s]) * 1e6:.1f}" for s in sizes) + " µs")
    for size in ("4096", str(1 << 20)):
        if size in samples["message"]["weft"]:
            ratios = round_ratios(samples["message"]["gloo"][size], samples["message"]["weft"][size])
            log(f"{ranks} ranks, message of {size} bytes to and fro over Gloo's: {median(ratios):.1f}x")
    return samples, found[0]["manner"]


def _slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """Round by round, over the ranks."""
    return [max(times) for times in zip(*samples, strict=True)]


def goals_of(ranks: int, samples: Samples) -> list[Goal]:
    """The figures that were set for 2 ranks, and for 4 ranks on 2 cores."""
    wanted = [("all_reduce", 64 << 20, 5.0)]
    if ranks == 2:
        wanted += [("all_reduce", 4 << 10, 30.0), ("reduce_scatter", 64 << 20, 5.0), ("all_gather", 64 << 20, 5.0)]
    goals = [
        _faster(collective, size, goal, ranks, samples)
        for collective, size, goal in wanted
        if str(size) in samples[collective]["weft"]
    ]
    if str(64 << 20) in samples["all_reduce"]["weft"]:
        goals.append(_faster("all_reduce", 64 << 20, 5.0, ranks, samples, "weft, tensor in shared memory"))
    size = str(64 << 20)
    ways = samples["all_reduce"]
    if ranks == 2 and size in ways["weft"]:
        copies = [min(pair) for pair in zip(ways["memcpy of libc"][size], ways["memcpy of torch"][size], strict=True)]
        shares = [100 * a / b for a, b in zip(copies, ways["weft, tensor in shared memory"][size], strict=True)]
        goals.append(
            Goal(
                what="of the memcpy limit, all-reduce of 64 MB in shared memory, 2 ranks",
                measured=median(shares),
                goal=60,
                better="higher",
                spread=spread(shares),
                unit=" %",
            )
        )
    return goals


def _faster(collective: str, size: int, goal: float, ranks: int, samples: Samples, way: str = "weft") -> Goal:
    ratios = round_ratios(samples[collective]["gloo"][str(size)], samples[collective][way][str(size)])
    shown = f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"
    cores = "" if size >> 20 else " with a core each" if ranks <= len(os.sched_getaffinity(0)) else " on shared cores"
    return Goal(  # a small call lasts as long as it takes to wake a rank, which is ten times as long on shared cores
        what=f"{collective.replace('_', '-')} over Gloo's at {shown}, {ranks} ranks{cores}{way.removeprefix('weft')}",
        measured=median(ratios),
        goal=goal,
        better="higher",
        spread=spread(ratios),
        unit="x",
    )


def training(ranks: int, rounds: int) -> tuple[list[Goal], dict[str, Any]]:
    """A step of an 8.4 M-parameter model under FSDP2 on both backends, on Weft's with its buffers in ordinary and in
    shared memory, and without any communication."""
    target = "benchmarks._communication:fsdp_step"
    entries = [Entry(name=name, target=target, settings=settings, ranks=ranks) for name, settings in _STEPS.items()]
    with contenders(entries, warmup_steps=3) as alive:
        blocks = interleave(alive, rounds=rounds, steps=3)
        losses = {contender.entry.name: contender.warm_losses for contender in alive}
    seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
    own = [name for name in seconds if name.startswith("fsdp2 weft")]
    ratios = {name: round_ratios(seconds["fsdp2 gloo"], seconds[name]) for name in own}
    assert all(losses[name] == losses["fsdp2 gloo"] for name in own) or ranks > 2, (
        "the backends do not compute the same"
    )
    goals = [
        Goal(
            what=f"FSDP2 step of 8.4 M parameters over that on Gloo{name.removeprefix('fsdp2 weft')}, {ranks} ranks",
            measured=median(ratios[name]),
            goal=2.0,
            better="higher",
            spread=spread(ratios[name]),
            unit="x",
        )
        for name in own
    ]
    for goal in goals:
        log(f"{goal.what}: {goal.measured:.2f}x")
    limit = round_ratios(seconds["fsdp2 gloo"], seconds["fsdp2, nothing sent"])
    log(f"FSDP2 step over Gloo's if nothing were sent, {ranks} ranks: {median(limit):.2f}x")
    return goals if ranks == 2 else [], {
        "seconds": seconds,
        "ratios": {**ratios, "fsdp2, nothing sent": limit},
        "losses": losses,
    }


def main() -> None:
    parser = options_parser(__doc__, rounds=9)
    parser.add_argument("--only", choices=("collectives", "training"))
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    for ranks in options.ranks:
        if options.only != "training":
            found, manner = collectives(ranks, options.rounds, options.largest)
            goals += goals_of(ranks, found)
            samples[f"{ranks} ranks"] = {"seconds": found, "manner": manner}
        if options.only != "collectives":
            more, samples[f"fsdp2, {ranks} ranks"] = training(ranks, options.rounds)
            goals += more
    about = {"machine": before, "versions": versions(), "note": options.note}
    write_result("communication", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
