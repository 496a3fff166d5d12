"""Draw demo.png from the metrics of two runs of the demo's recipe, cut to 60 steps.

    weft train examples/demo/recipe.toml --plan examples/demo/plan.toml \
        --set recipe.run.steps=60 --set recipe.run.log_every=1
    weft train examples/demo/recipe.toml --processes 1 --set recipe.run.steps=60 --set recipe.run.log_every=1
    python docs/pictures/draw_demo.py RUN_OF_8 RUN_OF_1

Without arguments it draws the runs that are kept beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

FOLDER = Path(__file__).parent
KEPT = (FOLDER / "demo-8-processes.jsonl", FOLDER / "demo-1-process.jsonl")
STAGES = ("embedding\nblocks 0–2", "block 3\nnorm, head")
COLOURS = ("#1f5f8b", "#d97b29")
FIELDS = ("step", "loss", "count", "gradient_norm", "learning_rate")


def read(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def keep(source: Path, target: Path) -> None:
    """Copy what the curve needs of a run's metrics."""
    kept = [{"kind": "step", **{name: line[name] for name in FIELDS}} for line in read(source)]
    target.write_text("".join(json.dumps(line) + "\n" for line in kept))


def draw_curves(axes: Any, eight: list[dict[str, Any]], one: list[dict[str, Any]]) -> None:
    steps = [line["step"] for line in eight]
    losses = [[line["loss"] for line in run] for run in (eight, one)]
    axes.plot(steps, losses[1], color=COLOURS[1], linewidth=6, alpha=0.55, label="1 process")
    axes.plot(steps, losses[0], color=COLOURS[0], linewidth=1.6, label="8 processes: data 2 × tensor 2 × pipeline 2")
    apart = [abs(a - b) / b for a, b in zip(*losses, strict=True)]
    early, furthest = max(apart[:10]), max(apart)
    axes.set(xlabel="step", ylabel="loss (mean over tokens)", title="One recipe, two plans")
    axes.text(
        0.97, 0.71, f"largest relative difference\nin 10 steps: {early:.0e}\nin {len(steps)} steps: {furthest:.0e}",
        ha="right", transform=axes.transAxes,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def draw_plan(axes: Any) -> None:
    """Two copies of the model; in each, two stages below one another and every matrix in two halves.

    The stages are cut by cost: the head is as heavy as a block.
    """
    for data in range(2):
        left = data * 2.6
        axes.text(left + 1, 2.32, f"data {data}: {'first' if data == 0 else 'second'} half of the batch", ha="center")
        for stage in range(2):
            for tensor in range(2):
                rank = stage * 4 + data * 2 + tensor
                corner = (left + tensor, 1.15 - stage * 1.15)
                axes.add_patch(
                    plt.Rectangle(corner, 0.94, 1.0, color=COLOURS[tensor], alpha=0.95 - 0.5 * stage, linewidth=0)
                )
                ink = "white" if stage == 0 else "black"
                axes.text(corner[0] + 0.47, corner[1] + 0.62, f"rank {rank}", ha="center", weight="bold", color=ink)
                axes.text(corner[0] + 0.47, corner[1] + 0.3, f"half {tensor}", ha="center", color=ink)
    for stage, text in enumerate(STAGES):
        axes.text(-0.12, 1.65 - stage * 1.15, f"stage {stage}\n{text}", ha="right", va="center")
    axes.set(xlim=(-1.3, 4.7), ylim=(-0.15, 2.6), title="Who holds what")
    axes.axis("off")


def main() -> None:
    if len(sys.argv) == 3:
        for run, kept in zip(sys.argv[1:], KEPT, strict=True):
            keep(Path(run) / "metrics.jsonl", kept)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(1.05, 1))
    draw_curves(left, *(read(path) for path in KEPT))
    draw_plan(right)
    figure.tight_layout()
    figure.savefig(FOLDER / "demo.png", dpi=110)


if __name__ == "__main__":
    main()
