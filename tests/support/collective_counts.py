"""How many steps, messages and bytes each collective takes of the busiest rank, written down from the formulas."""

from __future__ import annotations

from collections.abc import Callable

from weft.config.cluster import Collective


def log2(members: int) -> int:
    return (members - 1).bit_length()


def power(members: int) -> int:
    return 1 << (members.bit_length() - 1)


Count = Callable[[int], float]
COUNTS: dict[tuple[str, Collective], tuple[Count, Count, Count]] = {
    # steps of the busiest rank; most messages that one rank sends; most bytes that one rank sends, in tensors
    ("ring", "all_reduce"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("ring", "reduce_scatter"): (lambda n: n - 1, lambda n: n - 1, lambda n: (n - 1) / n),
    ("ring", "all_gather"): (lambda n: n - 1, lambda n: n - 1, lambda n: (n - 1) / n),
    ("ring", "broadcast"): (lambda n: min(2, n - 1), lambda n: 1, lambda n: 1),
    ("ring", "all_to_all"): (lambda n: n - 1 + (n > 2), lambda n: n - 1, lambda n: (n - 1) / 2),
    ("double_ring", "all_reduce"): (lambda n: 2 * (n - 1), lambda n: 4 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("double_ring", "reduce_scatter"): (lambda n: n - 1, lambda n: 2 * (n - 1), lambda n: (n - 1) / n),
    ("double_ring", "all_gather"): (lambda n: n - 1, lambda n: 2 * (n - 1), lambda n: (n - 1) / n),
    ("double_ring", "broadcast"): (lambda n: min(4, n - 1 - (n == 5)), lambda n: 2, lambda n: 1),
    ("double_ring", "all_to_all"): (lambda n: n // 2 + (n > 2), lambda n: n // 2 * 2, lambda n: n * n // 4 / n),
    ("tree", "all_reduce"): (lambda n: 2 * log2(n), log2, log2),
    ("tree", "broadcast"): (log2, log2, log2),
    ("recursive_doubling", "all_reduce"): (
        lambda n: log2(power(n)) + 2 * (n > power(n)),
        lambda n: log2(power(n)) + (n > power(n)),
        lambda n: log2(power(n)) + (n > power(n)),
    ),
    ("recursive_doubling", "all_gather"): (
        lambda n: log2(power(n)) + 2 * (n > power(n)),
        lambda n: log2(power(n)) + (n > power(n)),
        lambda n: (
            (sum((1 << k) + min(1 << k, n - power(n)) for k in range(log2(power(n)))) + (n - 1) * (n > power(n))) / n
        ),
    ),
    ("halving_doubling", "all_reduce"): (
        lambda n: 2 * log2(power(n)) + 2 * (n > power(n)),
        lambda n: 2 * log2(power(n)) + (n > power(n)),
        lambda n: 2 * (power(n) - 1) / power(n) + (n > power(n)),
    ),
    ("halving_doubling", "reduce_scatter"): (log2, log2, lambda n: (n - 1) / n),
    ("halving_doubling", "all_gather"): (log2, log2, lambda n: (n - 1) / n),
    ("direct", "all_reduce"): (lambda n: 2, lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("direct", "reduce_scatter"): (lambda n: 1, lambda n: n - 1, lambda n: (n - 1) / n),
    ("direct", "all_gather"): (lambda n: 1, lambda n: n - 1, lambda n: (n - 1) / n),
    ("direct", "all_to_all"): (lambda n: 1, lambda n: n - 1, lambda n: (n - 1) / n),
    ("one_shot", "all_reduce"): (lambda n: 1, lambda n: n - 1, lambda n: n - 1),
    ("one_shot", "broadcast"): (lambda n: 1, lambda n: n - 1, lambda n: n - 1),
    ("bruck", "all_reduce"): (lambda n: 2 * log2(n), lambda n: 2 * log2(n), lambda n: 2 * (n - 1) / n),
    ("bruck", "reduce_scatter"): (log2, log2, lambda n: (n - 1) / n),
    ("bruck", "all_gather"): (log2, log2, lambda n: (n - 1) / n),
    ("bruck", "all_to_all"): (
        lambda n: log2(n) + (n > 2),  # the last one turns blocks around in memory
        log2,
        lambda n: sum(d.bit_count() for d in range(n)) / n,
    ),
    ("scatter", "broadcast"): (lambda n: log2(n) + n - 1, lambda n: log2(n) + n - 1, lambda n: 2 * (n - 1) / n),
    ("parameter_server", "all_reduce"): (lambda n: 2, lambda n: n - 1, lambda n: n - 1),
    ("parameter_server", "broadcast"): (lambda n: 1, lambda n: n - 1, lambda n: n - 1),
}
