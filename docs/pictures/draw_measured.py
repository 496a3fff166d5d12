"""Draw the measured curves of docs/concepts/communication.md: `python docs/pictures/draw_measured.py`.

Seconds of all-reduces by size from benchmarks/results/selector.json, beside what the formulas say with the latency and
bandwidth that ranks measured there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend is chosen first

from weft.comm.algorithms import Links, flat, predict  # noqa: E402

FOLDER = Path(__file__).parent
RESULT = FOLDER.parents[1] / "benchmarks" / "results" / "selector.json"
PANELS = (
    ("host", "2", "one host, 2 ranks on 2 cores"),
    ("host", "4", "one host, 4 ranks on 2 cores"),
    ("slow", "2+2", "2 hosts with 2 ranks each, 1 Gbit/s"),
)
STYLES: Mapping[str, tuple[str, str]] = {
    "ring": ("#2980b9", "s"),
    "recursive_doubling": ("#27ae60", "v"),
    "halving_doubling": ("#16a085", "^"),
    "direct": ("#8e44ad", "D"),
    "tree": ("#d35400", "<"),
    "one_shot": ("#7f8c8d", ">"),
    "hierarchical": ("#c0392b", "o"),
    "backend": ("k", "x"),
}


def times_of(cell: Mapping[str, Any], name: str) -> float | None:
    """Median seconds; of an algorithm that was left out of the race, its one run."""
    if name in cell["seconds"]:
        return median(cell["seconds"][name])
    return cell["left_out"].get(name)


def main() -> None:
    samples = json.loads(RESULT.read_text())["samples"]
    figure, panels = plt.subplots(1, len(PANELS), figsize=(15, 4.6), layout="constrained", sharey=True)
    for axes, (shape, ranks, title) in zip(panels, PANELS, strict=True):
        found = samples[shape][ranks]
        race, links = found["race"]["all_reduce"], Links(**found["links"])
        nodes = tuple(int(count) for count in ranks.split("+"))
        place = flat(sum(nodes), nodes=nodes)
        sizes = [int(size) for size in race]
        for name, (color, marker) in STYLES.items():
            points = [(size, seconds) for size in sizes if (seconds := times_of(race[str(size)], name)) is not None]
            if not points:
                continue
            label = "Gloo" if name == "backend" else name.replace("_", " ")
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, [y * 1e3 for y in ys], marker=marker, color=color, markersize=5, linewidth=1.3, label=label)
            foretold = [predict("all_reduce", size, place, links).get(name) for size in sizes]
            if all(seconds is not None for seconds in foretold):
                axes.plot(sizes, [s * 1e3 for s in foretold if s], ":", color=color, linewidth=1)
        axes.set(xscale="log", yscale="log", title=title, xlabel="bytes")
        axes.set_xticks(sizes, [f"{s >> 20}M" if s >> 20 else f"{s >> 10}K" for s in sizes])
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("milliseconds of an all-reduce; dotted: by the formula")
    panels[-1].legend(fontsize=8)
    figure.savefig(FOLDER / "collectives-measured.png", dpi=110)


if __name__ == "__main__":
    main()
