"""Random numbers that are a hash of (seed, step, sample, layer, element of the whole activation)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.techniques.randomness.keyed_dropout import GOLDEN, RESOLUTION, kept_rows, mix

MANTISSA = 53
COARSE = 1e-3
"""A probability that 16 bits give to this relative accuracy is drawn with 16 bits."""


class Numbers(Protocol):
    """Numbers for the elements of a draw that this rank holds, (samples, …)."""

    def uniform(self, salt: int = 0) -> Tensor:
        """fp64 in [0, 1)."""
        ...

    def normal(self) -> Tensor:
        """fp64 of mean 0 and deviation 1."""
        ...

    def kept(self, probability: float) -> Tensor:
        """bool, true with `probability`."""
        ...


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of one draw that this rank holds, sample by sample."""

    samples: Tensor
    """int64 words of the samples, (samples,), keyed by seed, step and layer."""
    starts: Sequence[int]
    """First index along each dim of a sample's whole activation."""
    sizes: Sequence[int]
    """Indices held along each dim."""
    whole: Sequence[int]
    """Sizes of a sample's whole activation."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.samples.numel(), *self.sizes)

    def _rows(self) -> Tensor:
        """Numbers of the held rows (all dims but the last) in the whole, 1-D."""
        found = torch.zeros(1, dtype=torch.int64, device=self.samples.device)
        for start, size, whole in list(zip(self.starts, self.sizes, self.whole, strict=True))[:-1]:
            here = torch.arange(start, start + size, device=self.samples.device)
            found = (found[:, None] * whole + here).flatten()
        return found

    def _last(self) -> tuple[int, int]:
        return (self.starts[-1], self.sizes[-1]) if self.sizes else (0, 1)

    def words(self, salt: int = 0) -> Tensor:
        """int64 of `shape`."""
        start, width = self._last()
        columns = torch.arange(start, start + width, device=self.samples.device)
        rows = mix(mix(self.samples + salt)[:, None] + self._rows() * GOLDEN)
        return mix(rows[..., None] + columns * GOLDEN).view(self.shape)

    def uniform(self, salt: int = 0) -> Tensor:
        """fp64 in [0, 1) of `shape`."""
        return uniform_of(self.words(salt))

    def normal(self) -> Tensor:
        """fp64 of mean 0 and deviation 1 (Box and Muller 1958)."""
        radius = self.uniform(1).neg_().log1p_().mul_(-2.0).sqrt_()
        return radius.mul_(self.uniform(2).mul_(2 * math.pi).cos_())

    def kept(self, probability: float) -> Tensor:
        """bool of `shape`, true with `probability`."""
        dropped = dropped_of(probability)
        if not dropped:
            return self.uniform() < probability
        start, width = self._last()
        return kept_rows(self.samples, self._rows(), (start, start + width), dropped).reshape(self.shape)


def dropped_of(probability: float) -> int:
    """Return how many of `RESOLUTION` elements are dropped where each is kept with `probability`; 0: that is too
    coarse, and each is drawn by itself."""
    dropped = round((1.0 - probability) * RESOLUTION)
    error = abs(dropped / RESOLUTION - (1.0 - probability))
    return dropped if 0 < dropped < RESOLUTION and error <= COARSE * min(probability, 1.0 - probability) else 0


def uniform_of(words: Tensor) -> Tensor:
    """Return words as numbers, fp64 in [0, 1)."""
    return ((words >> (64 - MANTISSA)) & ((1 << MANTISSA) - 1)).to(torch.float64).mul_(2.0**-MANTISSA)


@dataclass(frozen=True, slots=True)
class Joined:
    """Numbers for several runs of tokens, one behind another along a dim; see `Numbers`."""

    parts: Sequence[Elements]
    dim: int

    def uniform(self, salt: int = 0) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.uniform(salt) for part in self.parts], self.dim)

    def normal(self) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.normal() for part in self.parts], self.dim)

    def kept(self, probability: float) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.kept(probability) for part in self.parts], self.dim)
