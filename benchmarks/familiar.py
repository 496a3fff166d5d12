"""What a loop of one's own costs under a session: beside plain PyTorch in one process, and beside DDP on two ranks.

Steps of about 5 ms, interleaved.  DDP sends over Gloo; the session once as it does by itself, in memory that the ranks
share, and once over Gloo.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import median_interval, spread

_SETTINGS = {"blocks": 24, "batch": 32, "is_last": True}


_LOOPS: dict[str, tuple[str, dict[str, str]]] = {
    "plain loop": ("session", {"backend": "auto"}),
    "plain loop over Gloo": ("session", {"backend": "gloo"}),
    "loop for Accelerate": ("accelerator", {}),
}


def _measured(ranks: int, rounds: int) -> tuple[str, dict[str, list[float]], dict[str, list[float]]]:
    """The peer's name, and by name seconds and processor seconds of a step, round by round."""
    peer = "plain" if ranks == 1 else "ddp"
    entries = [Entry(name=peer, target=f"benchmarks._familiar:{peer}", settings=_SETTINGS, ranks=ranks)]
    for name, (function, more) in _LOOPS.items():
        if ranks > 1 or name == "plain loop":
            target = f"benchmarks._familiar:{function}"
            entries.append(Entry(name=name, target=target, settings={**_SETTINGS, **more}, ranks=ranks))
    with contenders(entries, warmup_steps=40) as alive:
        blocks = interleave(alive, rounds=rounds, steps=40)
    seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
    return peer, seconds, {name: [median(block.cpu_seconds) for block in found] for name, found in blocks.items()}


def main() -> None:
    options = options_parser(__doc__, rounds=30).parse_args()
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    for ranks in (1, 2):
        peer, seconds, cpu = _measured(ranks, options.rounds)
        samples[f"{ranks} ranks"] = {"seconds": seconds, "cpu_seconds": cpu}
        for name in seconds:
            if name == peer:
                continue
            more = [(a / b - 1) * 100 for a, b in zip(seconds[name], seconds[peer], strict=True)]
            samples[f"{ranks} ranks"] |= {f"percent_interval, {name}": median_interval(more)}
            log(f"{name}, {ranks} ranks: {median(seconds[peer]) * 1e3:.2f} ms by {peer}, {median(more):.1f} % more")
            if ranks > 1:  # one process pays for what is looked at, and has nobody to share it with: no goal is set
                what = f"{name} under a session over DDP, two ranks"
                goals.append(
                    Goal(what=what, measured=median(more), goal=3.0, better="lower", spread=spread(more), unit=" %")
                )
    about = {"machine": before, "versions": versions(), "settings": _SETTINGS, "note": options.note}
    write_result("familiar", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
