"""The order of the samples of a session's loader: one pass after another, as an endless stream of positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.run.data._keyed import Permutation


class LoaderOrder:
    """Which sample of a data set stands at each position, as `Sampler` says it of a recipe's corpora.

    A pass that shuffles is a permutation of (seed, pass) over the whole data set, also where `drop_last` leaves samples
    out: each pass leaves out others.  A *sample id* is `pass × size + index`.

    Args:
        size: Samples in the data set.
        pass_size: Samples of a pass.
        shuffles: Whether passes are permuted; otherwise the data set's own order stands.
    """

    def __init__(self, size: int, pass_size: int, *, seed: int, shuffles: bool) -> None:
        self.sizes, self.pass_sizes = (size,), (pass_size,)
        self._seed, self._shuffles = seed, shuffles
        self._last: tuple[int, Permutation] | None = None

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at positions of the stream."""
        passes, indices = np.divmod(positions, self.pass_sizes[0])
        if self._shuffles:
            # A batch at once: a permutation costs about as much for one position as for a thousand.
            for number in np.unique(passes).tolist():
                indices[passes == number] = self._permutation(number)(indices[passes == number])
        return passes * self.sizes[0] + indices

    def locate(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (0, pass, index in the data set) of each sample id."""
        passes, indices = np.divmod(ids, self.sizes[0])
        return np.zeros_like(ids), passes, indices

    def _permutation(self, number: int) -> Permutation:
        if self._last is None or self._last[0] != number:
            self._last = number, Permutation(self.sizes[0], self._seed, number)
        return self._last[1]
