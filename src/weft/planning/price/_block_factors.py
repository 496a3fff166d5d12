"""Blocks that `weft probe` measured against the sum of their operators: what operators alone do not show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.config.cluster import BlockTime
from weft.model.profile import Block, ModelSizes, Operator, profile_of_sizes
from weft.techniques.cost_terms import ELEMENT_BYTES, Device, OperatorWork, Share, Work, operator_work

_LEAST, _MOST = 0.5, 12.0
"""Factors beyond these say that something else ran during the measurement, not what a block costs."""
_STEPS = 200


class PassFit(NamedTuple):
    """One pass: element-wise work takes `factor` times what its bytes say, and every operator `extra` seconds more."""

    factor: float = 1.0
    extra: float = 0.0


class BlockFit(NamedTuple):
    """Costs of operators within a block, over their costs alone."""

    forward: PassFit = PassFit()
    backward: PassFit = PassFit()

    def of(self, operator: Operator, work: OperatorWork, *, inside: bool) -> OperatorWork:
        """The passes of one operator inside a block, or of the stem or tail: a loss in chunks has no norms to slow it,
        and its chunks stay in the cache."""
        is_plain = inside and operator.kind in ("elementwise", "gather")
        forward, backward = (self.forward.factor, self.backward.factor) if is_plain else (1.0, 1.0)
        return OperatorWork(
            work.forward.times(forward).plus(Work(memory=self.forward.extra)),
            work.input.times(backward).plus(Work(memory=self.backward.extra)),
            work.weight,
        )


class _MeasuredPass(NamedTuple):
    """One pass of a measured block, in seconds."""

    products: float
    """Matrix products and attention, as they were measured alone."""
    plain: float
    """Element-wise work, after its bytes."""
    measured: float


def block_fit(device: Device, precision: str) -> BlockFit:
    """Return what blocks of this precision cost beside their operators, as measured on this device.

    Norms, activations and rotations of heads compute more than they move, in proportion to their size; calls,
    bookkeeping and allocation cost the same whatever it is.  Measured blocks of several sizes show both.
    """
    speeds = device.speeds
    rows = [row for row in speeds.blocks if row.precision == precision] if speeds else []
    if not rows or speeds is None:
        return BlockFit()
    forward: list[_MeasuredPass] = []
    backward: list[_MeasuredPass] = []
    operators = 1
    for row in rows:
        block = _block(row)
        operators = len(block.operators)
        there, back = _summed(device, block, row)
        forward.append(_MeasuredPass(*there, row.forward_seconds * speeds.scale))
        backward.append(_MeasuredPass(*back, row.backward_seconds * speeds.scale))
    return BlockFit(_fit(forward, operators), _fit(backward, operators))


def _fit(seen: Sequence[_MeasuredPass], operators: int) -> PassFit:
    """The factor with the least squared logarithm of predicted over measured; the smallest block says the extra."""
    # Two unknowns: a factor, which grows with size, and an extra, which does not. The smallest block shows the extra
    # best, so it follows from the factor there, and one unknown is left.
    smallest = min(seen, key=lambda one: one.measured)

    def extra(factor: float) -> float:
        if len(seen) == 1:
            return 0.0
        return max(0.0, smallest.measured - smallest.products - factor * smallest.plain)

    def loss(factor: float) -> float:
        more = extra(factor)
        # Logarithms: half as long and twice as long are equally wrong.
        return sum(math.log((one.products + factor * one.plain + more) / one.measured) ** 2 for one in seen)

    # A geometric grid: the loss has corners where the extra reaches 0, at which a search by slopes would stop.
    factors = [_LEAST * (_MOST / _LEAST) ** (step / _STEPS) for step in range(_STEPS + 1)]
    factor = min(factors, key=loss)
    return PassFit(factor, extra(factor) / operators)


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


def _summed(device: Device, block: Block, row: BlockTime) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of products and of element-wise work, forward; the same, backward."""
    share = Share(
        samples=row.samples,
        sequence=row.tokens,
        precision=row.precision,  # pyright: ignore[reportArgumentType]
        gradient_bytes=ELEMENT_BYTES.get(row.precision, 2),
    )
    forward, backward = [0.0, 0.0], [0.0, 0.0]
    for operator in block.operators:
        work = operator_work(device, operator, share, 1.0)
        kind = 1 if operator.kind in ("elementwise", "gather") else 0
        forward[kind] += work.forward.seconds
        backward[kind] += work.input.seconds + work.weight.seconds
    return (forward[0], forward[1]), (backward[0], backward[1])
