"""Which tokens of a sequence each of the ranks that share it has: one run near its head and one near its tail.

Under a causal mask a token costs as much attention as tokens stand before it.  A sequence is cut in twice as many runs
as there are ranks, and rank i takes run i and the one that stands as far from the end, so that all have the same work
(Brandon et al. 2023, https://arxiv.org/abs/2311.09431, balance in stripes; Megatron-LM by such pairs).  Without a mask
every share is as good as any other, so there is one rule for all.  No torch.
"""

from __future__ import annotations

Runs = tuple[tuple[int, int], tuple[int, int]]
"""[start, stop) of the run near the head and of the one near the tail; a run may be empty."""


def runs_of(length: int, ranks: int, index: int) -> Runs:
    """Return the runs of rank `index` of a sequence of `length` tokens.  Runs of all ranks differ by one token at most,
    so any length is shared out."""
    parts = 2 * ranks
    return _bounds(length, parts, index), _bounds(length, parts, parts - 1 - index)


def tokens_of(length: int, ranks: int, index: int) -> int:
    """Return how many tokens rank `index` has."""
    return sum(stop - start for start, stop in runs_of(length, ranks, index))


def most_tokens(length: int, ranks: int) -> int:
    """Return how many tokens the rank with the most has."""
    return max(tokens_of(length, ranks, index) for index in range(ranks))


def copies_of(kv_heads: int, ranks: int) -> int:
    """Return how often heads of keys must be there for each of `ranks` to have as many; 0: no number does it."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else 0


def _bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    share, longer = divmod(length, parts)
    start = index * share + min(index, longer)
    return start, start + share + (index < longer)
