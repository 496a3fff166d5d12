"""Keyed randomness: every random choice of this package is a pure function of integers, in plain numpy.

Sources: splitmix64 finaliser, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014);
Feistel networks over products of integers and cycle walking, Black and Rogaway, "Ciphers with arbitrary finite
domains" (2002).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, the increment of splitmix64."""
_ROUNDS = 8


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each value (a bijection of the 64-bit integers)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keyed(*keys: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Hash the keys, broadcast against each other, to uint64 of at least one dimension."""
    # One round for each key: keys in another order, or one more of them, give another number.
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            # Scalars pass through Python so that negative and 64-bit seeds wrap instead of failing.
            part = np.uint64(key & 0xFFFFFFFFFFFFFFFF) if isinstance(key, int) else key.astype(np.uint64)
            state = mix((state ^ part) + _GOLDEN)
    return state


def uniform(*keys: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) keyed by `keys`, with 53 random bits."""
    return (keyed(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(*keys: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """Return standard normal numbers keyed by `keys` (Box and Muller)."""
    # uniform() may be 0 and is never 1, so 1 − u keeps the logarithm finite.
    radius = np.sqrt(-2.0 * np.log1p(-uniform(*keys, 1)))
    return radius * np.cos(2.0 * math.pi * uniform(*keys, 2))


class Permutation:
    """A permutation of range(size) that is computed, never stored.

    The square that holds `size` is `rows × columns` with fewer than `rows` spare cells, so positions that fall outside
    walk on almost never.

    Example:
        >>> sorted(Permutation(5, 1234, 0)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size > 0, size
        self.size = size
        # Two halves of nearly equal size mix best; with rows = ⌈√size⌉ fewer than `rows` cells are spare.
        rows = math.isqrt(size - 1) + 1
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-size // rows))
        self._round_keys = [int(keyed(*key, size, number)[0]) for number in range(2 * _ROUNDS)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each position of the epoch points, int64 of the same shape."""
        flat = np.asarray(positions, np.int64).ravel()
        assert not flat.size or (flat.min() >= 0 and flat.max() < self.size), "position outside the permutation"
        result = self._once(flat.astype(np.uint64))
        # Cycle walking: a position that falls on a spare cell is mapped on, until it falls inside.  That is a
        # permutation of range(size), because the network is one of the larger square.
        while (outside := np.flatnonzero(result >= np.uint64(self.size))).size:
            result[outside] = self._once(result[outside])
        return result.astype(np.int64).reshape(np.shape(positions))

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # A Feistel network adds to one half what a hash makes of the other, which can be undone: so it is a bijection,
        # whatever the hash.
        left, right = values // self._columns, values % self._columns
        for number in range(0, 2 * _ROUNDS, 2):
            left = (left + keyed(self._round_keys[number], right) % self._rows) % self._rows
            right = (right + keyed(self._round_keys[number + 1], left) % self._columns) % self._columns
        return left * self._columns + right
