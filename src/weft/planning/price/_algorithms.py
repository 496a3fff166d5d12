"""Costs of collectives that no schedule of Weft's runs: sums made by switches, and plain sends.

The algorithms that ranks run themselves have their formulas beside their schedules, in `weft.comm.algorithms`.  The
arguments are the same: `members` ranks, `size_bytes` of the whole tensor, `latency` seconds of a message, `per_byte`
seconds for each byte that one rank sends.

Source: Klenk et al., "An in-network architecture for accelerating shared-memory multiprocessor collectives", ISCA 2020.
"""

from __future__ import annotations


def in_network_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2α + (1 + 1/n)Sβ: switches sum what all send up and send the sum down (Klenk et al., §IV).

    Each rank gives S and fetches its own n-th of the sum, then gives that and receives S.
    """
    return 2 * latency + (1 + 1 / members) * size_bytes * per_byte


def in_network_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2α + Sβ: switches copy what the root sends; the same for any number of members."""
    del members
    return 2 * latency + size_bytes * per_byte


def point_to_point(size_bytes: float, latency: float, per_byte: float) -> float:
    """α + Sβ."""
    return latency + size_bytes * per_byte
