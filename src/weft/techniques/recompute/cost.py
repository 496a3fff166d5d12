"""What recomputation costs: what of a forward runs again, and what is kept until then.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import TypeVar

from weft.techniques.recompute.settings import Recompute

Cost = TypeVar("Cost")


def computed_again(recompute: Recompute, nothing: Cost, selective: Cost, forward: Cost) -> Cost:
    """Return what a block computes again before its backward: nothing, what is cheap for what it keeps, or its
    whole forward."""
    return {"none": nothing, "selective": selective, "full": forward}[recompute]


def waiting_bytes(recompute: Recompute, whole: float, selected: float, entry: float) -> float:
    """Return what a block keeps until its backward: all that it needs, what is selected of it, or what enters it."""
    return {"none": whole, "selective": min(whole, selected), "full": entry}[recompute]
