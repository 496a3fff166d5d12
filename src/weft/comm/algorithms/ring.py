"""Ring: each rank talks to its two neighbours only.

    reduce-scatter, 4 ranks, 4 parts (a to d); a number counts the ranks that a part is summed over

      rank 0 ──► rank 1 ──► rank 2 ──► rank 3 ──► rank 0

      step 1    0 sends d1    1 sends a1    2 sends b1    3 sends c1
      step 2    0 sends c2    1 sends d2    2 sends a2    3 sends b2
      step 3    0 sends b3    1 sends c3    2 sends d3    3 sends a3
      end       0 holds a4    1 holds b4    2 holds c4    3 holds d4

    all-gather: the sums go around once more, and are copied instead of added.

    all-to-all, 5 ranks: a block for the rank d places on goes d steps, one place in each

      step 1    blocks for 1, 2, 3, 4 places on        step 3    blocks for 3, 4
      step 2    blocks for 2, 3, 4                     step 4    blocks for 4

Every link carries the same bytes in every step, and no rank ever needs more than one message in and one out: the ring
moves the fewest bytes possible and suits any number of ranks, long tensors, and links that contend.  It pays 2(n−1)
latencies, which is too many for short tensors.  An all-to-all around a ring moves n/2 times the bytes of a direct one:
it is for links that join neighbours only, which would forward them, too.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, §3.1 and
§4.5; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, chained, timed, turned_around


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(n−1)α + 2(n−1)/n·Sβ: each of n parts goes around twice, summed and then spread (Thakur et al., §4.5)."""
    return 2 * half_seconds(members, size_bytes, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/n·Sβ: reduce-scatter or all-gather around a ring (Thakur et al., §3.1)."""
    return (members - 1) * latency + (members - 1) / members * size_bytes * per_byte


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + Sβ: small pieces follow one another down a chain."""
    return (members - 1) * latency + size_bytes * per_byte


def all_to_all_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/2·Sβ: a block goes through every rank on its way, n/2 of them on average."""
    return (members - 1) * (latency + size_bytes / 2 * per_byte)


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Reduce-scatter, then all-gather; one block per rank."""
    return [*reduce_scatter(line, blocks), *all_gather(line, blocks)]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, after which the rank at position i has the sum of block i."""
    n, i = len(line), line.position
    following, before = line.at(1), line.at(-1)
    # A block starts one place behind its owner, goes round and grows by one addend per step: after n − 1 steps it is
    # complete where it belongs.
    return [
        Step(
            "reduce-scatter",
            (Send(following, blocks[(i - 1 - step) % n]),),
            (Receive(before, blocks[(i - 2 - step) % n], reduce=True),),
        )
        for step in range(n - 1)
    ]


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, before which the rank at position i has block i."""
    n, i = len(line), line.position
    following, before = line.at(1), line.at(-1)
    return [
        Step("all-gather", (Send(following, blocks[(i - step) % n]),), (Receive(before, blocks[(i - 1 - step) % n]),))
        for step in range(n - 1)
    ]


def broadcast(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Down a chain that begins with the first of the line; blocks are pieces that follow one another."""
    return timed(chain(line, blocks), "chain")


def chain(line: Line, blocks: Sequence[Runs]) -> list[tuple[int, Send | Receive]]:
    """The messages of `broadcast` with their ticks."""
    actions: list[tuple[int, Send | Receive]] = []
    for index, piece in enumerate(blocks):
        if line.position > 0:
            actions.append((line.position + index, Receive(line.at(-1), piece)))
        if line.position < len(line) - 1:
            actions.append((line.position + index + 1, Send(line.at(1), piece)))
    return actions


def all_to_all(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send block j to the rank at position j, which finds it as its block i: in place.

    As in `bruck`, what travels d places in all rests in slot i + d of every rank i on its way.
    """
    n, i = len(line), line.position
    steps: list[Step] = []
    # In step s only blocks with s places or more to go move, all of them by one place; slot i + d goes to slot i + d of
    # the next rank, which is d − 1 places from its end.
    for step in range(1, n):
        moving = chained(blocks[(i + distance) % n] for distance in range(step, n))
        steps.append(Step("all-to-all", (Send(line.at(1), moving),), (Receive(line.at(-1), moving),)))
    return [*steps, *turned_around(line, blocks)]
