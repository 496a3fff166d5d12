"""Numbers that a loop of the user's own draws for the samples of a step: the same under every plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.techniques.randomness._draw_values import Elements
from weft.techniques.randomness.keyed_dropout import sample_words


class SampleDraws:
    """Draws with a row for each sample, keyed by (seed, step, sample, number of the draw in its step, element).

    Every process computes the rows of its own samples; nothing is sent, and no generator moves.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = -1
        self._drawn = 0

    def drawn(self, step: int) -> int:
        """Draws that were made for a step; other ranks' next ones are only alike if they have made as many."""
        return self._drawn if step == self._step else 0

    def randn(self, step: int, samples: Tensor, shape: Sequence[int]) -> Tensor:
        """fp64 of mean 0 and deviation 1, (samples, *shape)."""
        return self._next(step, samples, shape).normal()

    def rand(self, step: int, samples: Tensor, shape: Sequence[int]) -> Tensor:
        """fp64 in [0, 1), (samples, *shape)."""
        return self._next(step, samples, shape).uniform()

    def randint(self, step: int, samples: Tensor, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """int64 of `low` to `high` − 1, (samples, *shape)."""
        return (self.rand(step, samples, shape) * (high - low)).floor_().to(torch.int64) + low

    def _next(self, step: int, samples: Tensor, shape: Sequence[int]) -> Elements:
        """`samples`: numbers of the samples in the run, int64, (samples,)."""
        self._drawn = self.drawn(step) + 1
        self._step = step
        words = sample_words(f"loop {self._drawn}", self._seed, step, samples)
        return Elements(samples=words, starts=[0] * len(shape), sizes=tuple(shape), whole=tuple(shape))
