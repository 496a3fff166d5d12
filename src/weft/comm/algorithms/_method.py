"""What an algorithm is to those who use it: its collectives, each with its cost, its blocks and its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.comm.algorithms import hierarchical
from weft.comm.algorithms._arrange import Arrangement
from weft.comm.algorithms._schedule import Line, Runs, Step

if TYPE_CHECKING:
    from weft.config.cluster import Collective, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Seconds of a message and of a byte between nodes, and inside them where that differs."""

    latency: float
    per_byte: float
    inner_latency: float | None = None
    inner_per_byte: float | None = None

    @property
    def across(self) -> tuple[float, float]:
        return self.latency, self.per_byte

    @property
    def inside(self) -> tuple[float, float]:
        latency = self.latency if self.inner_latency is None else self.inner_latency
        return latency, self.per_byte if self.inner_per_byte is None else self.inner_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a method is asked for, beside its blocks."""

    arrangement: Arrangement
    line: Line
    root: int
    """Position of the root on the line."""
    pieces: int
    servers: int

    @property
    def rooted(self) -> Line:
        """The line turned so that it begins with the root."""
        ranks, n = self.line.ranks, len(self.line)
        if self.root == 0:
            return self.line
        return Line([ranks[(self.root + index) % n] for index in range(n)], (self.line.position - self.root) % n)


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm for one collective."""

    seconds: Callable[[Arrangement, float, Links], float]
    """Time for a whole tensor of so many bytes.  The parameter server is priced with one server."""
    num_blocks: Callable[[Task], int]
    """Blocks into which it cuts the buffer; where each rank has a region, that region."""
    steps: Callable[[Task, Sequence[Runs]], list[Step]]
    """Steps of the rank that the task's line points to."""
    levels: Callable[[Task, Sequence[Runs]], hierarchical.Levels] | None = None
    """The same level by level, where the algorithm knows nodes whose ranks may share memory."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of the ways to do collectives."""

    name: str
    summary: str
    """One line that says for whom it is."""
    suits: tuple[Topology, ...]
    """Links that carry it without contention."""
    methods: Mapping[Collective, Method]
    """The collectives that it defines, by name."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(self.methods)


FlatCost = Callable[[int, float, float, float], float]
