"""Gradients as 8-bit integers with one fp32 scale for every 256 of them: 3.94 times fewer bytes than fp32.

    packed run:   scale₀ scale₁ … (fp32)   q₀ q₁ q₂ … (int8, padded to 4 bytes)

A block's scale is its largest magnitude over 127, so nothing is clipped and one outlier costs 255 neighbours their
precision, no more.  With round to nearest ‖C(x) − x‖² ≤ 256/(4·127²) ‖x‖² < 0.004 ‖x‖² for every block, which needs no
error feedback.  Blocks count from the start of a storage, so up to 255 numbers at either end of a parameter share the
scale of its neighbour's; parameters of fewer than 1,024 numbers, whose blocks might all do so, travel as they are.
Source: block-wise quantisation as in Dettmers et al., arXiv 2110.02861, §2.1 (linear, not dynamic).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from weft.techniques.compression.codecs._two_phase import TwoPhaseCodec
from weft.techniques.compression.wire import SCALED_BLOCK, int8_bytes

_TINIEST = 2.0**-120
"""Scales below are taken for zero: their inverse would be near the end of fp32."""


@final
class Int8(TwoPhaseCodec):
    """Symmetric, linear, to nearest; blocks count from the start of each part."""

    is_biased = False
    keeps_zeros = True
    block = SCALED_BLOCK

    def packed_bytes(self, length: int) -> int:
        return int8_bytes(length)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        """A block with a value that is not finite gets a scale that is not, and so unpacks to NaN."""
        length = len(values)
        whole = length // self.block * self.block
        blocks = self._blocks(length)
        scales = packed[: 4 * blocks].view(torch.float32)
        numbers = packed[4 * blocks :].view(torch.int8)
        if whole:
            _quantise(values[:whole].view(-1, self.block), scales[: whole // self.block], numbers[:whole])
        if whole < length:
            _quantise(values[whole:].view(1, -1), scales[-1:], numbers[whole:length])
        numbers[length:].zero_()

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        length = len(values)
        whole = length // self.block * self.block
        blocks = self._blocks(length)
        scales = packed[: 4 * blocks].view(torch.float32)
        numbers = packed[4 * blocks :].view(torch.int8)
        if whole:
            shaped = values[:whole].view(-1, self.block)
            shaped.copy_(numbers[:whole].view(-1, self.block)).mul_(scales[: whole // self.block, None])
        if whole < length:
            values[whole:].copy_(numbers[whole:length]).mul_(scales[-1])


def _quantise(rows: Tensor, scales: Tensor, numbers: Tensor) -> None:
    """Fill scales (rows,) and numbers (rows × columns,) from rows (rows, columns)."""
    # From both ends instead of `abs().amax()`: no temporary of the size of the gradients.
    low, high = rows.amin(1), rows.amax(1)
    scale = torch.maximum(high, -low).div_(127.0)
    scales.copy_(scale.masked_fill_(scale < _TINIEST, 0.0))
    # One division per block, and multiplications for its numbers.  A scale that is not finite reaches the receiver,
    # who unpacks NaN and skips the step; the numbers themselves must be finite to be cast.
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    scaled = (rows * inverse[:, None]).round_().clamp_(-127.0, 127.0).nan_to_num_(0.0)
    numbers.copy_(scaled.view(-1))
