"""How quantised gradients are summed: all-to-all, a sum in full precision, all-gather.

An all-reduce of int8 numbers would overflow, and an all-gather of everybody's moves (n − 1)·S bytes.  Here each member
owns one part.  It receives that part from all others, adds up in rank order in the gradients' own precision, rounds the
sum once more and hands it out: 2(n − 1)/n · S compressed bytes, two roundings whatever n, and the same bits on every
member, because all unpack the same bytes.  The owner's own contribution is not rounded.

    1   each rank → owner of part p     its rounded share of part p      n − 1 messages of S/n
    2   owner of part p → each rank     the rounded sum of part p        n − 1 messages of S/n

Where each rank needs its own region of the sum only (ZeRO-1 and 2), parts are regions and the second phase falls away.
With error feedback a rank owes what its shares lost on the way to their owners, and an owner what the sum lost when it
was packed: the latter comes back in its own share, which is not packed.
Source: 8-bit two-shot all-reduce as in ZeRO++ (Wang et al., arXiv 2306.10209, §3.3), without its node hierarchy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_gather
from weft.techniques.compression.codecs._compressor import Stages, Stateless
from weft.techniques.compression.codecs._exchange import places_of, start_all_to_all
from weft.techniques.compression.wire import Frame


class TwoPhaseCodec(Stateless, ABC):
    """Elementwise or blockwise rounding of a run of gradients into bytes, summed in two phases."""

    block: int
    """Elements that share something: parts begin at its multiples, counted from the start of a run."""
    keeps_zeros: bool
    """Whether zeros are unpacked as zeros; signs have no zero."""

    @abstractmethod
    def packed_bytes(self, length: int) -> int:
        """Bytes of a packed run of so many elements; a multiple of 4."""

    @abstractmethod
    def pack(self, values: Tensor, packed: Tensor) -> None:
        """Round a run (length,) into `packed` (packed_bytes(length),) of uint8."""

    @abstractmethod
    def unpack(self, packed: Tensor, values: Tensor) -> None:
        """Write what `pack` kept into `values` (length,)."""

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """Replace `flat` by the sum over the members, or this rank's region of it by that region's sum.

        `owed` gets the error of packing: this rank's share in the other parts, and the sum in its own part.
        """
        parts = frame.parts(view.size, self.block)
        own = slice(*parts[view.index])
        mine = flat[own]
        places = places_of([self.packed_bytes(last - first) for first, last in parts])
        # Phase 1: (Σ packed bytes,) leaves, (members, bytes of this rank's part) comes in.
        packed = _pack_shares(self, flat, parts, places, view.index, owed)
        incoming = packed.new_empty((view.size, self.packed_bytes(len(mine))))
        yield start_all_to_all(packed, places, incoming, view)
        _add_in_rank_order(self, mine, incoming, view.index)
        _clear_padding(self, frame, flat, owed)
        if frame.regions is not None:  # ZeRO: parts are regions, and nobody needs the others
            return
        # Phase 2: the sum of this rank's part is rounded once more and handed out.
        gathered = torch.empty_like(packed)
        self.pack(mine, gathered[slice(*places[view.index])])
        if owed is not None:
            owed[own] = mine  # the exact sum; what all ranks unpack is subtracted below
        even = len({last - first for first, last in places}) == 1
        yield start_all_gather(gathered, places, view, even=even)
        for part, place in zip(parts, places, strict=True):
            self.unpack(gathered[slice(*place)], flat[slice(*part)])
        _clear_padding(self, frame, flat, None)
        if owed is not None:
            owed[own].sub_(mine)


def _add_in_rank_order(packing: TwoPhaseCodec, mine: Tensor, incoming: Tensor, index: int) -> None:
    """Sum every member's share of this rank's part into `mine`, (length,); its own share is not rounded.

    `incoming` is (members, packed bytes).
    """
    if not len(mine):
        return
    total, values = torch.empty_like(mine), torch.empty_like(mine)
    # In the order of ranks, not of arrival: floating-point sums depend on the order, and a run must be repeatable.
    for member in range(incoming.shape[0]):
        if member != index:
            packing.unpack(incoming[member], values)
        term = mine if member == index else values
        total = total.copy_(term) if member == 0 else total.add_(term)
    mine.copy_(total)


def _pack_shares(
    packing: TwoPhaseCodec,
    flat: Tensor,
    parts: Sequence[tuple[int, int]],
    places: Sequence[tuple[int, int]],
    index: int,
    owed: Tensor | None,
) -> Tensor:
    """Pack the shares of the other parts for their owners, and write the error of packing to `owed`."""
    packed = torch.empty(places[-1][1], dtype=torch.uint8, device=flat.device)
    for owner, (part, place) in enumerate(zip(parts, places, strict=True)):
        if owner != index:
            packing.pack(flat[slice(*part)], packed[slice(*place)])
            if owed is not None:
                packing.unpack(packed[slice(*place)], owed[slice(*part)])
                torch.sub(flat[slice(*part)], owed[slice(*part)], out=owed[slice(*part)])
        elif owed is not None:
            owed[slice(*part)] = 0
    return packed


def _clear_padding(packing: TwoPhaseCodec, frame: Frame, flat: Tensor, owed: Tensor | None) -> None:
    """Set padding to zero again where the packing has no zero."""
    if packing.keeps_zeros:
        return
    for gap in frame.gaps():
        flat[gap] = 0
        if owed is not None:
            owed[gap] = 0
