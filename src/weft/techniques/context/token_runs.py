"""Which tokens of a sequence each of the ranks that share it has: one run near its head and one near its tail.

Under a causal mask a token costs as much attention as tokens stand before it.  A sequence is cut in twice as many runs
as there are ranks, and rank i takes run i and the one that stands as far from the end, so that all have the same work
(Brandon et al. 2023, https://arxiv.org/abs/2311.09431, balance in stripes; Megatron-LM by such pairs).  Without a mask
every share is as good as any other, so there is one rule for all.  No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HEADS, BETWEEN = "context_heads", "context_ring"
"""Names of groups inside the context axis, by which what they send is recorded: neighbours that exchange heads, and
those between which keys go round."""
Runs = tuple[tuple[int, int], tuple[int, int]]
"""[start, stop) of the run near the head and of the one near the tail; a run may be empty."""


def runs_of(length: int, ranks: int, index: int) -> Runs:
    """Return the runs of rank `index` of a sequence of `length` tokens.  Runs of all ranks differ by one token at most,
    so any length is shared out."""
    parts = 2 * ranks
    return _bounds(length, parts, index), _bounds(length, parts, parts - 1 - index)


def joint_runs(length: int, groups: int, index: int, neighbours: int) -> Runs:
    """Return the runs of group `index`. Those of its `neighbours` lie side by side, near both ends of a sample."""
    ranks = groups * neighbours
    (start, stop), (first, last) = runs_of(length, ranks, index * neighbours)
    if neighbours == 1:
        return (start, stop), (first, last)
    (_, stop), (first, _) = runs_of(length, ranks, (index + 1) * neighbours - 1)
    return (start, stop), (first, last)


def tokens_of(length: int, ranks: int, index: int) -> int:
    """Return how many tokens rank `index` has."""
    return sum(stop - start for start, stop in runs_of(length, ranks, index))


def most_tokens(length: int, ranks: int) -> int:
    """Return how many tokens the rank with the most has."""
    return max(tokens_of(length, ranks, index) for index in range(ranks))


@dataclass(frozen=True, slots=True)
class Shown:
    """Which of its tokens each of the ranks shows to others: all of them, or those that a later run sees through a
    window, which are the last of each run."""

    length: int
    """Tokens of a sample."""
    ranks: int
    window: int | None = None
    """Tokens that each sees, itself among them; None: there is no window."""
    together: int = 1
    """Neighbours that stand for one of `ranks`, with the tokens of all of them."""

    def every(self, index: int) -> Runs:
        """Positions of all tokens of rank `index`."""
        return joint_runs(self.length, self.ranks, index, self.together)

    def of(self, index: int) -> Runs:
        """Positions of the tokens that rank `index` shows."""
        first, second = self.every(index)
        return self._end(*first), self._end(*second)

    def places(self, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return [start, stop) of what rank `index` shows among its own tokens, end to end."""
        (start, stop), (first, last) = self.every(index)
        (shown, _), (later, _) = self.of(index)
        num_first = stop - start
        return (shown - start, num_first), (num_first + later - first, num_first + last - first)

    def tokens(self, index: int) -> int:
        """How many tokens rank `index` shows."""
        return sum(stop - start for start, stop in self.of(index))

    @property
    def most(self) -> int:
        """How many tokens the rank shows that shows the most."""
        return max(self.tokens(index) for index in range(self.ranks))

    def _end(self, start: int, stop: int) -> tuple[int, int]:
        return (start if self.window is None else max(start, stop - self.window + 1)), stop


def copies_of(kv_heads: int, ranks: int) -> int:
    """Return how often heads of keys must be there for each of `ranks` to have as many.

    So many are lcm(kv heads, ranks), which divides the heads of queries where both do: each rank then has whole groups.
    """
    return ranks // math.gcd(kv_heads, ranks)


def _bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    share, longer = divmod(length, parts)
    start = index * share + min(index, longer)
    return start, start + share + (index < longer)


def exchanging_ranks(ranks: int, heads: int, kv_heads: int) -> int:
    """Return among how many neighbours of `ranks` heads are best exchanged where keys go round between such groups: as
    many as can be without all of them, rather such as need no copies of the heads of keys; 0: no number does it."""
    fits = [neighbours for neighbours in range(2, ranks) if ranks % neighbours == 0 and heads % neighbours == 0]
    alike = [neighbours for neighbours in fits if copies_of(kv_heads, neighbours) == 1]
    return max(alike or fits, default=0)
