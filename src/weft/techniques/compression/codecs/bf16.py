"""Gradients as bfloat16 on the wire: half the bytes of fp32, three significant digits, the whole range of exponents.

Not an all-reduce in bf16, whose every hop would round the running sum: two phases, with the sum in full precision.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from weft.comm import GroupView
from weft.techniques.compression.codecs._compressor import Stages, Stateless
from weft.techniques.compression.codecs._frame import Frame, WireBytes
from weft.techniques.compression.codecs._two_phase import reduce_in_two_phases, two_phase_bytes


@final
class BFloat16(Stateless):
    """Rounds to nearest even; a relative error of at most 2⁻⁸ per rounding, two roundings per sum."""

    is_biased = False
    keeps_zeros = True
    block = 2
    """Elements so many that every part begins at a multiple of 4 bytes."""

    def packed_bytes(self, length: int) -> int:
        return 2 * (length + length % 2)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        packed.view(torch.bfloat16)[: len(values)].copy_(values)
        packed[2 * len(values) :].zero_()

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.bfloat16)[: len(values)])

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """See `Compressor`."""
        return reduce_in_two_phases(self, flat, frame, view, owed)

    def wire_bytes(self, frame: Frame, members: int, index: int, element_bytes: int) -> WireBytes:
        """See `Compressor`."""
        return two_phase_bytes(self, frame, members, index)
