"""Draw the volumes of tensor schemes in docs/concepts/parallelism.md: `python docs/pictures/draw_grids.py`.

Elements that each tensor rank receives for a transformer layer in forward and backward, by the formulas that plans are
priced with (`weft.techniques.tensor.cost`), in units of M·H: M tokens of a microbatch, H the hidden size.  It prints
where the schemes cross.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend is chosen first

from weft.techniques.tensor.cost import received_elements  # noqa: E402

FOLDER = Path(__file__).parent
PANELS = {4: ("2d",), 8: ("2.5d", "3d"), 16: ("2d",), 64: ("2d", "3d")}
LAYER = ((3.0, 1.0), (1.0, 1.0), (4.0, 1.0), (1.0, 4.0))
"""(N, K) of products in units of H: query-key-value, attention's output, a feed-forward of four times the width."""
STYLES = {"1d": "k", "2d": "#2980b9", "2.5d": "#27ae60", "3d": "#c0392b"}

RATIOS = [2.0 ** (step / 16) for step in range(-32, 129)]
"""M/H."""


def volume(scheme: str, ranks: int, tokens: float) -> float:
    """Elements per M·H.  In one dimension: two sums of an activation forward, and two backward."""
    if scheme == "1d":
        return 4 * 2.0 * (ranks - 1) / ranks
    return sum(received_elements(scheme, ranks, tokens, n, k) for n, k in LAYER) / tokens


def crossing(scheme: str, ranks: int) -> float | None:
    """The least M/H at which a scheme moves less than one dimension."""
    return next((m for m in RATIOS if volume(scheme, ranks, m) < volume("1d", ranks, m)), None)


def main() -> None:
    figure, panels = plt.subplots(1, len(PANELS), figsize=(15, 4.2), layout="constrained", sharey=True)
    for axes, (ranks, schemes) in zip(panels, PANELS.items(), strict=True):
        for scheme in ("1d", *schemes):
            axes.plot(RATIOS, [volume(scheme, ranks, m) for m in RATIOS], color=STYLES[scheme], label=scheme)
            if scheme != "1d":
                print(f"{ranks} ranks, {scheme}: less than 1d from M = {crossing(scheme, ranks) or float('inf'):.2f} H")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 16)
        axes.set_title(f"{ranks} tensor ranks")
        axes.set_xlabel("tokens of a microbatch / hidden size")
        axes.legend()
    panels[0].set_ylabel("received elements / (M·H), per layer")
    figure.savefig(FOLDER / "tensor-grids.png", dpi=110)


if __name__ == "__main__":
    main()
