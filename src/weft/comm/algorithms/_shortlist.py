"""Which ways of a collective are worth measuring: the cost formulas prune, and measurement decides.

The formulas know no contention: they never prefer a ring, which moves the same bytes as direct exchange in more steps,
though on links that are shared it is often faster.  So ways that they cannot tell apart are all kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.comm.algorithms import direct, ring
from weft.comm.algorithms._arrange import Arrangement
from weft.comm.algorithms._choices import BUILT_IN, defines
from weft.comm.algorithms._method import Links
from weft.comm.algorithms._registry import ALGORITHMS, find_algorithm
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.config.cluster import Collective, Topology

KEPT = 3
"""Ways that are measured at least, where there are so many, beside the built-in ones."""
CLOSE = 1.25
"""Candidates up to so many times the lowest prediction are kept, too: the formulas are no better than that."""
SHORT_SECONDS = 2e-3
"""What is predicted to take less is measured whatever it is: that takes no time, and where ranks share cores the number
of messages counts for more than how many go at once, which the formulas do not know."""
_ACROSS_NODES = ("hierarchical+recursive_doubling", "hierarchical+direct", "hierarchical+tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCandidate:
    """One way of a collective at one size."""

    name: str
    predicted_seconds: float
    measured_seconds: float | None = None
    """Median over the runs of the slowest rank's time; None: it was pruned."""
    note: str = ""
    """Why it was pruned."""


def fit_links(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return latency and seconds per byte of the line that fits times by message size best, by relative error.

    The line does not fall, and its latency is at least half of the fastest time, whatever noise the times have.
    """
    weights = [(1 / seconds, size / seconds) for size, seconds in times if seconds > 0]
    if len(weights) < 2:
        raise CollectiveError(f"links cannot be fitted to {len(weights)} timings: measure at least 2 sizes.")
    aa, ab, bb = (sum(w[i] * w[j] for w in weights) for i, j in ((0, 0), (0, 1), (1, 1)))
    ya, yb = sum(w[0] for w in weights), sum(w[1] for w in weights)
    scale = aa * bb - ab * ab
    fastest = min(seconds for _, seconds in times)
    latency = (ya * bb - yb * ab) / scale if scale > 0 else fastest
    latency = max(latency, 0.5 * fastest)
    per_byte = (yb - latency * ab) / bb if bb > 0 else 0.0
    return (latency, per_byte) if per_byte > 0 else (fastest, 0.0)


def predict(
    collective: Collective,
    size_bytes: int,
    place: Arrangement,
    links: Links,
    *,
    topology: Topology | None = None,
    backend: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return the seconds of every way that does a collective and suits the links, by name.

    `topology` is by default fully connected inside one node, and a switch between several.  `backend` is seconds of a
    call and of a byte of the group's own collective, where that is shared memory; by default it is Gloo's.
    """
    if topology is None:
        topology = "fully_connected" if len(place.nodes) == 1 else "switch"
    names = [name for name, algorithm in ALGORITHMS.items() if topology in algorithm.suits]
    if len(place.nodes) > 1:
        names += _ACROSS_NODES
    names = [*BUILT_IN, *(name for name in names if name != "hierarchical" or len(place.nodes) > 1)]
    seconds = {
        name: _seconds(name, collective, size_bytes, place, links) for name in names if defines(name, collective)
    }
    return seconds if backend is None else seconds | {"backend": backend[0] + backend[1] * size_bytes}


def shortlist(predicted: Mapping[str, float]) -> list[MethodCandidate]:
    """Return all ways, the cheapest first; those that are not worth measuring have a note.

    Built-in ways are always kept: what is chosen is then never slower than what is done without a choice.
    """
    order = sorted(predicted, key=lambda name: predicted[name])
    algorithms = [name for name in order if name not in BUILT_IN]
    best = predicted[algorithms[0]] if algorithms else 0.0
    limit = max(CLOSE * best, SHORT_SECONDS)
    kept = {*BUILT_IN, *algorithms[:KEPT], *(name for name in algorithms if predicted[name] <= limit)}
    return [
        MethodCandidate(
            name=name,
            predicted_seconds=predicted[name],
            note="" if name in kept else f"predicted {predicted[name] / best:.1f} × the cheapest",
        )
        for name in order
    ]


def _seconds(name: str, collective: Collective, size_bytes: int, place: Arrangement, links: Links) -> float:
    """Gloo, the backend of CPUs, goes by rings; a reduce-scatter is an all-reduce by it."""
    n, across = place.members, links.across
    if name == "exchange":
        return direct.half_seconds(n, size_bytes, *across)
    if name == "backend":
        cost = ring.half_seconds if collective == "all_gather" else ring.all_reduce_seconds
        return cost(n, size_bytes, *across)
    return find_algorithm(name).methods[collective].seconds(place, size_bytes, links)
