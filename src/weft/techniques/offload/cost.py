"""What a slower memory costs: what a pass waits for on its way there and back, and the optimizer on the host's cores.

Source: Ren et al., "ZeRO-Offload: democratizing billion-scale model training" (arXiv 2101.06840).
"""

from __future__ import annotations

from typing import NamedTuple

from weft.techniques.cost_terms import Calibration, Layout
from weft.techniques.offload.settings import DISK_BYTES_PER_SECOND
from weft.vectorized import Column, larger

BLOCKS_HERE = 2
"""Blocks of a rank whose activations are on the device where all wait elsewhere: one computes, and another's are
written, or read."""


def unloading(layout: Layout, size_bytes: Column, beside: Column, calibration: Calibration) -> Column:
    """Return the seconds by which one way of a stage's activations takes longer than what hides it: the link to the
    host, or the disk, is free while the stage computes, and while it waits for weights (`beside` seconds together)."""
    host = calibration.host_link_bytes_per_second
    return larger(0.0, size_bytes / (DISK_BYTES_PER_SECOND if layout.offloads_to_disk else host) - beside)


def reading(layout: Layout, elements: Column, calibration: Calibration) -> Column:
    """Return the seconds of a step in which a rank reads and writes its shards of weights and gradients, none hidden:
    weights for both passes of each microbatch, gradients after it, and on a disk both for the update."""
    if not layout.offloads_parameters:
        return 0.0
    if not layout.offloads_to_disk:
        both = 2.0 * layout.wide_bytes + layout.gradient_bytes
        return elements * layout.microbatches * both / calibration.host_link_bytes_per_second
    weights = (2.0 * layout.microbatches + 2.0) * layout.wide_bytes
    gradients = 2.0 * layout.microbatches * layout.gradient_bytes
    return elements * (weights + gradients) / DISK_BYTES_PER_SECOND


class HostStep(NamedTuple):
    """Seconds of an optimizer's step on the host."""

    worked: Column
    moved: Column
    """Seconds of gradients on their way there, and of weights on their way back."""


def host_step(layout: Layout, elements: Column, calibration: Calibration) -> HostStep:
    """Return what the host takes for the parameters whose states one rank has."""
    if layout.offloads_parameters:  # weights are there, and gradients come as they are summed
        moved = reading(layout, elements, calibration)
        return HostStep(elements * 2.0 * layout.master_bytes / calibration.host_optimizer_bytes_per_second, moved)
    moved = elements * (layout.gradient_bytes + layout.element_bytes) / calibration.host_link_bytes_per_second
    return HostStep(elements * 2.0 * layout.master_bytes / calibration.host_optimizer_bytes_per_second, moved)
