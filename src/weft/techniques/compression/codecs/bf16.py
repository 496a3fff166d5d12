"""Gradients as bfloat16 on the wire: half the bytes of fp32, three significant digits, the whole range of exponents.

Not an all-reduce in bf16, whose every hop would round the running sum: two phases, with the sum in full precision.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from weft.techniques.compression.codecs._two_phase import TwoPhaseCodec
from weft.techniques.compression.wire import bf16_bytes


@final
class BFloat16(TwoPhaseCodec):
    """Rounds to nearest even; a relative error of at most 2⁻⁸ per rounding, two roundings per sum."""

    is_biased = False
    keeps_zeros = True
    block = 2
    """Elements so many that every part begins at a multiple of 4 bytes."""

    def packed_bytes(self, length: int) -> int:
        return bf16_bytes(length)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        packed.view(torch.bfloat16)[: len(values)].copy_(values)
        packed[2 * len(values) :].zero_()

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.bfloat16)[: len(values)])
