"""What a collective costs by algorithm: formulas of latency and bandwidth, one function each.

`members` ranks work on `size_bytes`: the whole tensor (what all-gather returns, what reduce-scatter and all-to-all
take, on each rank).  A message takes `latency` seconds, and `per_byte` seconds for each byte that one rank sends.  What
sums cost is in `COPY_PASSES`, for all algorithms alike.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005 (ring,
recursive doubling, halving-doubling, binomial trees, Bruck); Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009 (double tree); Jain and Sabharwal, "Optimal bucket algorithms for large
MPI collectives on torus interconnects", 2010 (torus); Klenk et al., "An in-network architecture for accelerating
shared-memory multiprocessor collectives", ISCA 2020 (in-network).
"""

from __future__ import annotations

_ISSUE_SHARE = 0.25
"""Of the latency, that a rank needs to issue one more message while others are on their way."""
_TREE_SHARE = 0.92
"""Of a link's bandwidth, that pipelined trees reach in NCCL's tuning table."""
COPY_PASSES = 3.7
"""Times that an all-reduce reads or writes its tensor in device memory beside the links.

From vTrain's A100 tables (2, 4 and 8 devices; bus bandwidth 193, 218, 227 GB/s): S/t = 1 / (2(n−1)/n / B + γ) fits all
three within 0.3 % with B = 296 GB/s, the links' own speed, and γ = 1.81 ps/byte, 3.7 passes at 2039 GB/s.
"""


# ── all-reduce ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ring_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(n−1)α + 2(n−1)/n·Sβ: each of n parts goes around twice, summed and then spread (Thakur et al., §4.5)."""
    return 2 * ring_half(members, size_bytes, latency, per_byte)


def double_ring_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(n−1)α + (n−1)/n·Sβ, with β of one ring: two rings on links of their own carry half of the tensor each."""
    return ring_all_reduce(members, size_bytes / 2, latency, per_byte)


def tree_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2⌈log₂n⌉(α + Sβ): a binomial tree sums to the root and spreads the sum (Thakur et al., §3.2)."""
    return 2 * _steps(members) * (latency + size_bytes * per_byte)


def double_tree_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2⌈log₂n⌉α + 2Sβ/0.92: two trees; a rank is a leaf in one of them; small pieces (Sanders et al., §4; NCCL)."""
    return 2 * _steps(members) * latency + 2 * size_bytes * per_byte / _TREE_SHARE


def recursive_doubling_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """L(α + Sβ), L = log₂n: ranks 1, 2, 4, … apart exchange whole tensors; one step
    more hands the others their sum where n is no power of two."""
    steps = _steps(members) if _is_power(members) else _steps(members) + 1
    return steps * (latency + size_bytes * per_byte)


def halving_doubling_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2Lα + 2(n−1)/n·Sβ: halves, quarters, … are exchanged and summed, then gathered back (Rabenseifner).

    Where n is no power of two, the ranks beyond it first hand their tensors in and get the sum at the end: + 2(α + Sβ).
    """
    power = 1 << (members.bit_length() - 1)
    extra = 0.0 if power == members else 2 * (latency + size_bytes * per_byte)
    return extra + 2 * halving_half(power, size_bytes, latency, per_byte)


def direct_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(α + (n−2)o) + 2(n−1)/n·Sβ: every rank sums one part, then sends it to all (o: issuing one message, α/4)."""
    return 2 * direct_half(members, size_bytes, latency, per_byte)


def one_shot_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)Sβ: every rank sends its whole tensor to every other."""
    return latency + _issue(members, latency) + (members - 1) * size_bytes * per_byte


def in_network_all_reduce(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2α + (1 + 1/n)Sβ: switches sum what all send up and send the sum down (Klenk et al., §IV).

    Each rank gives S and fetches its own n-th of the sum, then gives that and receives S.
    """
    return 2 * latency + (1 + 1 / members) * size_bytes * per_byte


# ── reduce-scatter and all-gather: the halves of an all-reduce ────────────────────────────────────────────────────────


def ring_half(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/n·Sβ: reduce-scatter or all-gather around a ring (Thakur et al., §3.1)."""
    return (members - 1) * latency + (members - 1) / members * size_bytes * per_byte


def double_ring_half(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/2n·Sβ, with β of one ring."""
    return ring_half(members, size_bytes / 2, latency, per_byte)


def halving_half(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉α + (n−1)/n·Sβ: recursive halving, or doubling the other way (Thakur et al., §3.1 and §3.4).

    Bruck's variant has as many steps where n is no power of two.
    """
    return _steps(members) * latency + (members - 1) / members * size_bytes * per_byte


def direct_half(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)/n·Sβ: every rank sends a part to every other."""
    return latency + _issue(members, latency) + (members - 1) / members * size_bytes * per_byte


# ── all-to-all, broadcast, send ───────────────────────────────────────────────────────────────────────────────────────


def direct_all_to_all(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)/n·Sβ: every rank sends a part to every other (Thakur et al., §3.3, long messages)."""
    return direct_half(members, size_bytes, latency, per_byte)


def bruck_all_to_all(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """L(α + Sβ/2): half of the parts move 1, 2, 4, … ranks on (Bruck et al., 1997)."""
    return _steps(members) * (latency + size_bytes / 2 * per_byte)


def tree_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉(α + Sβ): a binomial tree (Thakur et al., §3.2)."""
    return _steps(members) * (latency + size_bytes * per_byte)


def double_tree_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉α + Sβ/0.92: two trees in small pieces (Sanders et al., §3; NCCL)."""
    return _steps(members) * latency + size_bytes * per_byte / _TREE_SHARE


def chain_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + Sβ: small pieces follow one another down a chain."""
    return (members - 1) * latency + size_bytes * per_byte


def scatter_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(L + n − 1)α + 2(n−1)/n·Sβ: scatter, then a ring all-gather (van de Geijn; Thakur et al., §3.2)."""
    return (_steps(members) + members - 1) * latency + 2 * (members - 1) / members * size_bytes * per_byte


def in_network_broadcast(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2α + Sβ: switches copy what the root sends; the same for any number of members."""
    del members
    return 2 * latency + size_bytes * per_byte


def point_to_point(size_bytes: float, latency: float, per_byte: float) -> float:
    """α + Sβ."""
    return latency + size_bytes * per_byte


def _steps(members: int) -> int:
    """⌈log₂n⌉."""
    return (members - 1).bit_length()


def _is_power(members: int) -> bool:
    return members & (members - 1) == 0


def _issue(members: int, latency: float) -> float:
    """Seconds of issuing messages to the second and all further peers."""
    return max(0, members - 2) * _ISSUE_SHARE * latency
