"""What Weft's engine costs beside a loop written by hand for the same plan: same model, same kernels, same numerics.

One process beside a plain loop, and two ranks under ZeRO-0 beside DDP; both clip, both use torch's fused AdamW, neither
fuses the loss or compiles, so that nothing differs but the engine.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import median_interval, spread

_COMMON = {"max_grad_norm": 1.0, "fused": True, "tuned": True, "zero": 0, "fused_loss": False}
_SIZES: dict[str, dict[str, int]] = {
    "tiny llama": {"batch": 8},
    "very small": {
        "batch": 2,
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_size": 128,
        "num_heads": 4,
        "sequence_length": 64,
    },
}


def pairs(size: str) -> list[tuple[str, Entry, Entry]]:
    """(what, Weft, by hand)."""
    settings: dict[str, Any] = {**_COMMON, **_SIZES[size]}
    return [
        (
            f"{what}, {size}",
            Entry(name=f"weft {what} {size}", target="benchmarks._weft:weft", settings=settings, ranks=ranks),
            Entry(name=f"hand {what} {size}", target=f"benchmarks._handwritten:{hand}", settings=settings, ranks=ranks),
        )
        for what, hand, ranks in (("one process", "loop", 1), ("two ranks", "ddp", 2))
    ]


def main() -> None:
    parser = options_parser(__doc__, rounds=12)
    parser.add_argument("--only", default="", help="part of a pair's name, such as `one process`")
    options = parser.parse_args()
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    # Many short rounds: a shared machine gives two steps in a row times that differ by a fifth.
    for size, steps, times in (("tiny llama", 1, 4), ("very small", 40, 1)):
        for what, weft, hand in pairs(size):
            if options.only not in what:
                continue
            with contenders([weft, hand], warmup_steps=steps + 1) as alive:
                blocks = interleave(alive, rounds=options.rounds * times, steps=steps)
            seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
            overheads = [(w / h - 1) * 100 for w, h in zip(seconds[weft.name], seconds[hand.name], strict=True)]
            extra = [(w - h) * 1e3 for w, h in zip(seconds[weft.name], seconds[hand.name], strict=True)]
            cpu = {name: [median(block.cpu_seconds) for block in found] for name, found in blocks.items()}
            samples[what] = {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "extra_milliseconds": extra,
                "percent_interval": median_interval(overheads),
                "percent_of_fastest_steps": (min(seconds[weft.name]) / min(seconds[hand.name]) - 1) * 100,
            }
            low, high = median_interval(overheads)
            log(f"{what}: {median(overheads):.1f} %, 95 % confident between {low:.1f} and {high:.1f} %")
            if size == "tiny llama":
                goal = Goal(
                    what=f"step over a hand-written loop, {what}",
                    measured=median(overheads),
                    goal=2.0,
                    better="lower",
                    spread=spread(overheads),
                    unit=" %",
                )
                goals.append(goal)
    about = {"machine": before, "versions": versions(), "settings": {**_COMMON, **_SIZES}, "note": options.note}
    write_result("overhead", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
