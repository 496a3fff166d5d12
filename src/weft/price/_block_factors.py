"""Blocks that `weft probe` measured against the sum of their operators: what operators alone do not show."""

from __future__ import annotations

import math

from weft.cluster import BlockTime
from weft.price._compute import ELEMENT_BYTES, Device, Share, operator_work
from weft.profile import ModelSizes, profile_of_sizes

_LEAST, _MOST = 0.5, 3.0
"""Factors beyond these say that something else ran during the measurement, not what a block costs."""


def block_factors(device: Device, precision: str) -> tuple[float, float]:
    """Return measured over summed seconds, forward and backward: the geometric mean over the measured blocks.

    Norms, activations, rotations of heads and allocation cost more than the bytes that they move; a whole block shows
    by how much.  1 where no block of this precision was measured.
    """
    speeds = device.speeds
    rows = [row for row in speeds.blocks if row.precision == precision] if speeds else []
    if not rows or speeds is None:
        return 1.0, 1.0
    forward, backward = 0.0, 0.0
    for row in rows:
        there, back = _summed(device, row)
        forward += math.log(row.forward_seconds * speeds.scale / there)
        backward += math.log(row.backward_seconds * speeds.scale / back)
    return _bounded(math.exp(forward / len(rows))), _bounded(math.exp(backward / len(rows)))


def _summed(device: Device, row: BlockTime) -> tuple[float, float]:
    """Seconds of the block's operators, forward and backward."""
    sizes = ModelSizes(
        num_layers=1,
        hidden_size=row.hidden_size,
        num_heads=row.heads,
        sequence_length=row.tokens,
        ffn_size=row.ffn_size,
        vocabulary_size=2,
    )
    share = Share(
        samples=row.samples,
        sequence=row.tokens,
        precision=row.precision,  # pyright: ignore[reportArgumentType]
        gradient_bytes=ELEMENT_BYTES.get(row.precision, 2),
    )
    works = [operator_work(device, operator, share, 1.0) for operator in profile_of_sizes(sizes).blocks[0].operators]
    forward = sum(work.forward.seconds for work in works)
    return forward, sum(work.input.seconds + work.weight.seconds for work in works)


def _bounded(factor: float) -> float:
    return min(_MOST, max(_LEAST, factor))
