"""signSGD: one bit per gradient, its sign, and one fp32 scale for every 256 of them; 28 times fewer bytes than fp32.

    packed run:   scale₀ scale₁ … (fp32)   sign₀ sign₁ … (1 bit each, padded to 4 bytes; 1 where x ≥ 0)

Ranks vote (Bernstein et al., ICML 2018, arXiv 1802.04434, and ICLR 2019, arXiv 1810.05291): each sends its signs of a
part to the part's owner, who sends the sign of the sum back, in the two phases of `_two_phase`.  Signs alone would not
do here.  An even number of ranks ties, two ranks at every second element; and the size of the gradients, which clipping
and learning rates look at, would be lost.  So votes weigh as much as their rank's gradients do: a block's scale is its
mean magnitude, ‖x‖₁/d, which brings ‖C(x) − x‖² = ‖x‖² − ‖x‖₁²/d to the least that signs can reach, below ‖x‖² by at
least 1/256 of it, and the owner's own share is exact.  Where all ranks have one mean magnitude that is the majority.

Without error feedback signs need not converge at all, not even on convex problems (Karimireddy et al., ICML 2019, arXiv
1901.09847, §3).  With it on both sides they do as SGD does: a rank owes what its signs leave out, an owner also what
the sign of the sum leaves out (Zheng et al., NeurIPS 2019, arXiv 1905.10936, whose blocks these are).  The owner adds
the latter to its own share of its part in the next step, which travels nowhere, and so loses nothing.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from weft.techniques.compression.codecs._two_phase import TwoPhaseCodec
from weft.techniques.compression.wire import SCALED_BLOCK, sign_bytes

_INTO_LAST_BYTE = 0x0102040810204080
"""Times eight bytes of 0 or 1: the last byte of the product has the i-th one as its i-th bit."""
_EIGHT_COPIES = 0x0101010101010101
_ONE_BIT_EACH = 0x8040201008040201 - 2**64
"""Masks of the i-th bit of the i-th of eight copies of a byte; as a signed number."""


@final
class SignSGD(TwoPhaseCodec):
    """Votes by sign, weighed by mean magnitudes; blocks count from the start of each part."""

    is_biased = True
    keeps_zeros = False
    block = SCALED_BLOCK

    def packed_bytes(self, length: int) -> int:
        return sign_bytes(length)

    def pack(self, values: Tensor, packed: Tensor) -> None:
        """A block with a value that is not finite gets a scale that is not."""
        length = len(values)
        whole, blocks = length // self.block * self.block, -(-length // self.block)
        scales = packed[: 4 * blocks].view(torch.float32)
        if whole:
            scales[: whole // self.block].copy_(values[:whole].view(-1, self.block).abs().mean(1))
        if whole < length:
            scales[-1:].copy_(values[whole:].abs().mean())
        # Eight bytes of 0 or 1 become one byte by a multiplication: torch has no operator that packs bits.
        signs = packed[4 * blocks :]
        bits = torch.zeros(8 * len(signs), dtype=torch.bool, device=values.device)
        torch.ge(values, 0, out=bits[:length])
        signs.copy_(bits.view(torch.int64).mul(_INTO_LAST_BYTE).view(torch.uint8).view(-1, 8)[:, 7])

    def unpack(self, packed: Tensor, values: Tensor) -> None:
        length = len(values)
        whole, blocks = length // self.block * self.block, -(-length // self.block)
        # The bits become 0 or 1, then −½ or +½, which twice the scale turns into −scale or +scale.
        doubled = 2 * packed[: 4 * blocks].view(torch.float32).to(values.dtype)
        copies = packed[4 * blocks :].to(torch.int64).mul_(_EIGHT_COPIES).bitwise_and_(_ONE_BIT_EACH)
        values.copy_(copies.view(torch.uint8)[:length] != 0).sub_(0.5)
        values[:whole].view(-1, self.block).mul_(doubled[: whole // self.block, None])
        values[whole:].mul_(doubled[-1:])
