"""Top-k: the largest few gradients of each rank with their places; all others wait in the error feedback.

    packet of a rank:   value₀ … value_{k−1}   index₀ … index_{k−1} (int32)

Values keep their sign and full precision.  Ranks choose different places, so packets cannot be summed on their way:
each goes to every other rank, (n − 1) · k · 8 bytes, which *grows* with n while an all-reduce's bytes do not.  With
fp32 gradients and n = 2 a share of one half sends exactly what an all-reduce does, and above it more.

The threshold is estimated from a sample of fixed places, then the few candidates above it are sorted: exact top-k of a
25 MiB bucket took 121 ms on one CPU thread, this 13.  The choice itself is exact, so ‖C(x) − x‖² ≤ (1 − k/d) ‖x‖².
Sources: Aji and Heafield, EMNLP 2017 (arXiv 1704.05021); sampling as in Lin et al., ICLR 2018 (arXiv 1712.01887, §3.1).
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_gather
from weft.techniques.compression.codecs._compressor import Stages, Stateless
from weft.techniques.compression.wire import INDEX_BYTES, Frame, chosen_count, packet_words

_SAMPLED = 400
"""Elements above the threshold that a sample should hold: its count is then 5 % off, one standard deviation."""
_MARGIN = 1.25
"""More candidates than are sent: five standard deviations."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@final
class TopK(Stateless):
    """Sends `share` of the elements of a storage, at least one."""

    is_biased = True

    def __init__(self, share: float) -> None:
        """Send this share of all elements, in (0, 1]."""
        assert 0 < share <= 1, "a share of the elements"
        self._share = share
        self._sample: Tensor | None = None

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """See `Compressor`."""
        assert len(flat) < 2**31, "indices are 32 bits wide"
        count = chosen_count(frame, self._share)
        places = self._choose(flat, count)  # (count or fewer,), rising
        # A packet is int32 words: values first, then indices, so that one gather carries both.
        width = flat.element_size() // INDEX_BYTES
        words = packet_words(frame, self._share, flat.element_size())
        packets = torch.zeros(view.size * words, dtype=torch.int32, device=flat.device)
        mine = packets[view.index * words : (view.index + 1) * words]
        mine[: len(places) * width].view(flat.dtype).copy_(flat[places])
        mine[count * width : count * width + len(places)].copy_(places)
        low, high = torch.aminmax(flat)
        mine[:width].view(flat.dtype).add_((low + high) * 0)  # NaN where anything was not finite, chosen or not
        if owed is not None:
            owed.copy_(flat)
            owed[places] = 0
        regions = [(member * words, (member + 1) * words) for member in range(view.size)]
        yield start_all_gather(packets, regions, view, even=True)
        flat.zero_()
        # In the order of ranks, so that every rank adds up in one order and gets the same bits.
        for packet in packets.view(view.size, words):
            values, chosen = packet[: count * width].view(flat.dtype), packet[count * width :][:count]
            flat.index_add_(0, chosen, values)  # unused room of a packet adds zero to the first element

    def _choose(self, flat: Tensor, count: int) -> Tensor:
        """Return the places of the `count` largest magnitudes, rising; fewer where fewer are not zero."""
        size = flat.abs()
        candidates = self._candidates(size, count)
        if len(candidates) > count:
            candidates = candidates[torch.topk(size[candidates], count, sorted=False).indices].sort().values
        return candidates

    def _candidates(self, size: Tensor, count: int) -> Tensor:
        """Return places that surely hold the largest `count` magnitudes, and few others."""
        # A threshold from a sample of fixed places: sorting (elements,) costs more than reading it twice.
        expected = _MARGIN * count / len(size)
        draws = math.ceil(_SAMPLED / expected)
        if expected < 1 and draws < len(size):
            threshold = torch.kthvalue(size[self._places(draws, size)], math.ceil((1 - expected) * draws)).values
            candidates = torch.nonzero(size >= threshold).view(-1) if threshold > 0 else torch.nonzero(size).view(-1)
            if len(candidates) >= count or threshold <= 0:
                return candidates
        # The sample was too high, which five standard deviations make rare; or it would be as long as the storage.
        return torch.topk(size, count, sorted=False).indices.sort().values

    def _places(self, draws: int, size: Tensor) -> Tensor:
        """Return the places of the sample: multiples of the golden ratio, which fall into step with no row length."""
        if self._sample is None:
            turns = torch.arange(draws, dtype=torch.float64) * _GOLDEN
            self._sample = ((turns - turns.floor()) * len(size)).long().clamp_(max=len(size) - 1).to(size.device)
        return self._sample
