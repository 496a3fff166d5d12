"""Random-k: a few elements that all ranks draw alike; the others wait in the error feedback.

The draw depends on (seed, parameter, how often that parameter was drawn for) and on nothing else, so every rank knows
the places without being told: only values travel, and an all-reduce can add them up on their way.  Its bytes do not
grow with the number of ranks, as top-k's do, and cost hardly any work.  Nor does the draw know of buckets or ZeRO
stages: the same parameters are sent whatever the plan.

    parameter   | . x . . | . . . x | x . . . | . . x |      one element of each of k runs of about equal length

One element of each run, not k of all, because a draw without repetition among d numbers takes time in d; no element
waits for more than its own run.  An element is sent with probability 1/⌈d/k⌉ or better, so that on average over draws
‖C(x) − x‖² ≤ (1 − 1/⌈d/k⌉) ‖x‖².

Unbiased scaling by d/k, without memory, would be the other way (Wangni et al., NeurIPS 2018, arXiv 1710.09854).  It
multiplies the variance of gradients by d/k, and so asks for a learning rate smaller by that; with memory and without
scaling the rate of convergence is that of SGD after enough steps (Stich et al., NeurIPS 2018, arXiv 1809.07599, for
random-k as for top-k).  So memory it is.  What makes this tier 3 is that an element's gradients of d/k steps
arrive in one lump, which a learning rate near its limit does not survive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_reduce
from weft.techniques.compression.codecs._compressor import KeptTensor, Stages
from weft.techniques.compression.wire import Frame, ParameterSpan, count_of

_WIDE = 2**62
"""Range of random integers, far more than any run is long: their remainders are even to 1 in 2³¹."""


@final
class RandomK:
    """Sends `share` of the elements of every parameter; keeps a count of draws for each."""

    is_biased = True

    def __init__(self, share: float, seed: int, frame: Frame) -> None:
        """Send this share of each parameter, in (0, 1]; `seed` must be the same on every rank."""
        assert 0 < share <= 1, "a share of the elements"
        self._share = share
        self._seed = seed
        self._draws = {span.name: torch.zeros(1, dtype=torch.int64) for span in frame.spans}
        self._rounds = 0
        """Rounds of the step under way, which may yet be skipped."""

    def count(self, span: ParameterSpan) -> int:
        """Elements of a parameter that are sent."""
        return count_of(span.num_elements, self._share)

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """See `Compressor`."""
        places = torch.cat([self._places(span) for span in frame.spans]).to(flat.device)  # the same on all ranks
        self._rounds += 1
        values = flat[places]
        low, high = torch.aminmax(flat)
        values[:1] += (low + high) * 0  # NaN where anything was not finite, drawn or not
        if owed is not None:
            owed.copy_(flat)
            owed[places] = 0
        yield start_all_reduce(values, view)
        # Not scaled by d/k: with error feedback the rest comes later, and scaling would count it twice.
        flat.zero_()
        flat[places] = values

    def begin_step(self) -> None:
        """Forget the draws of a step that was skipped: the next one repeats them."""
        self._rounds = 0

    def keep(self, skipped: Collection[str]) -> None:
        """Count the draws of what was applied."""
        for name, draws in self._draws.items():
            if name not in skipped:
                draws += self._rounds
        self._rounds = 0

    def kept(self, frame: Frame) -> Iterator[KeptTensor]:
        """Yield how often each parameter was drawn for."""
        for span in frame.spans:
            yield KeptTensor(kind="draws", name=span.name, tensor=self._draws[span.name], is_own=False)

    def _places(self, span: ParameterSpan) -> Tensor:
        draw = int(self._draws[span.name]) + self._rounds
        return span.offset + drawn_places(span.num_elements, self.count(span), f"{self._seed}/{span.name}/{draw}")


def drawn_places(length: int, count: int, key: str) -> Tensor:
    """Draw one place (count,) of each of `count` runs that tile [0, length); rising, decided by `key` alone."""
    words = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(words, "little") >> 1)
    bounds = torch.arange(count + 1, dtype=torch.int64) * length // max(count, 1)
    drawn = torch.randint(_WIDE, (count,), generator=generator, dtype=torch.int64)
    return bounds[:-1] + drawn.remainder_(bounds[1:] - bounds[:-1])
