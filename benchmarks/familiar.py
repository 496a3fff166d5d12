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


def _entries(ranks: int) -> tuple[Entry, list[Entry]]:
    """(by hand, under a session)."""
    hand = "plain" if ranks == 1 else "ddp"
    peer = Entry(name=hand, target=f"benchmarks._familiar:{hand}", settings=_SETTINGS, ranks=ranks)
    backends = ("auto",) if ranks == 1 else ("auto", "gloo")
    return peer, [
        Entry(
            name=f"session {backend} {ranks}",
            target="benchmarks._familiar:session",
            settings={**_SETTINGS, "backend": backend},
            ranks=ranks,
        )
        for backend in backends
    ]


def main() -> None:
    options = options_parser(__doc__, rounds=30).parse_args()
    before = machine()
    goals: list[Goal] = []
    samples: dict[str, Any] = {}
    for ranks in (1, 2):
        peer, sessions = _entries(ranks)
        with contenders([peer, *sessions], warmup_steps=40) as alive:
            blocks = interleave(alive, rounds=options.rounds, steps=40)
        seconds = {name: [median(block.seconds) for block in found] for name, found in blocks.items()}
        cpu = {name: [median(block.cpu_seconds) for block in found] for name, found in blocks.items()}
        for entry in sessions:
            more = [(a / b - 1) * 100 for a, b in zip(seconds[entry.name], seconds[peer.name], strict=True)]
            way = "" if ranks == 1 else " over Gloo" if "gloo" in entry.name else " in shared memory"
            what = f"own loop over {'plain PyTorch, one process' if ranks == 1 else f'DDP, two ranks{way}'}"
            goals.append(
                Goal(what=what, measured=median(more), goal=3.0, better="lower", spread=spread(more), unit=" %")
            )
            log(f"{what}: {median(seconds[peer.name]) * 1e3:.2f} ms by hand, {median(more):.1f} % more")
            samples[what] = {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "percent_interval": median_interval(more),
            }
    about = {"machine": before, "versions": versions(), "settings": _SETTINGS, "note": options.note}
    write_result("familiar", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
