"""Blocks that `weft probe` measured against the sum of their operators: what operators alone do not show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.cluster import BlockTime
from weft.price._compute import ELEMENT_BYTES, Device, OperatorWork, Share, Work, operator_work
from weft.profile import Block, ModelSizes, profile_of_sizes

_LEAST, _MOST = 0.5, 3.0
"""Factors beyond these say that something else ran during the measurement, not what a block costs."""
_ROUNDS = 4


class PassFit(NamedTuple):
    """One pass of an operator within a block takes `extra` seconds, and `factor` times what its size says."""

    factor: float = 1.0
    extra: float = 0.0


class BlockFit(NamedTuple):
    """What operators cost within a block, over what they cost alone."""

    forward: PassFit = PassFit()
    backward: PassFit = PassFit()

    def of(self, work: OperatorWork) -> OperatorWork:
        """The passes of one operator within a block."""
        return OperatorWork(
            work.forward.times(self.forward.factor).plus(Work(memory=self.forward.extra)),
            work.input.times(self.backward.factor).plus(Work(memory=self.backward.extra)),
            work.weight.times(self.backward.factor),
        )


def block_fit(device: Device, precision: str) -> BlockFit:
    """Return what blocks of this precision cost beside their operators, as measured on this device.

    Norms, activations, rotations of heads and allocation cost more than the bytes that they move, in proportion to a
    block's size; calls and bookkeeping cost the same whatever it is.  Measured blocks of several sizes show both.
    """
    speeds = device.speeds
    rows = [row for row in speeds.blocks if row.precision == precision] if speeds else []
    if not rows or speeds is None:
        return BlockFit()
    blocks = [_block(row) for row in rows]
    sums = [_summed(device, block, row) for block, row in zip(blocks, rows, strict=True)]
    operators = len(blocks[0].operators)
    measured = [(row.forward_seconds * speeds.scale, row.backward_seconds * speeds.scale) for row in rows]
    return BlockFit(
        _fit([(there, seen) for (there, _), (seen, _) in zip(sums, measured, strict=True)], operators),
        _fit([(back, seen) for (_, back), (_, seen) in zip(sums, measured, strict=True)], operators),
    )


def _fit(pairs: Sequence[tuple[float, float]], operators: int) -> PassFit:
    """Of (summed, measured) seconds: the smallest block says the extra time, the others the mean factor."""
    (smallest, least), *others = sorted(pairs)
    factor, extra = _bounded(least / smallest), 0.0
    if others:
        for _ in range(_ROUNDS):
            ratios = [math.log(max(measured - extra, 0.1 * measured) / summed) for summed, measured in others]
            factor = _bounded(math.exp(sum(ratios) / len(ratios)))
            extra = max(0.0, least - factor * smallest)
    return PassFit(factor, extra / operators)


def _block(row: BlockTime) -> Block:
    sizes = ModelSizes(
        num_layers=1,
        hidden_size=row.hidden_size,
        num_heads=row.heads,
        sequence_length=row.tokens,
        ffn_size=row.ffn_size,
        vocabulary_size=2,
    )
    return profile_of_sizes(sizes).blocks[0]


def _summed(device: Device, block: Block, row: BlockTime) -> tuple[float, float]:
    """Seconds of the block's operators, forward and backward."""
    share = Share(
        samples=row.samples,
        sequence=row.tokens,
        precision=row.precision,  # pyright: ignore[reportArgumentType]
        gradient_bytes=ELEMENT_BYTES.get(row.precision, 2),
    )
    works = [operator_work(device, operator, share, 1.0) for operator in block.operators]
    forward = sum(work.forward.seconds for work in works)
    return forward, sum(work.input.seconds + work.weight.seconds for work in works)


def _bounded(factor: float) -> float:
    return min(_MOST, max(_LEAST, factor))
