"""Measurements by `weft probe` of the devices of a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.document import Rules
from weft.errors import ClusterError

_RULES = Rules(ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpeed:
    """Matrix products M×K by K×N."""

    precision: str
    m: int
    n: int
    k: int
    ranks: int = 1
    """Ranks of the node that did the same at the same time."""
    threads: int = 1
    """Threads of each rank."""
    seconds: float
    """Median of the slowest rank; below too."""
    spread: float = 0.0
    """Half of the distance from the first to the third quartile, as a share of the median; below too."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "m", "n", "k", "ranks", "threads")
        _RULES.above_zero(self, "seconds")
        _RULES.at_least(self, 0, "spread")

    @property
    def flops_per_second(self) -> float:
        """Rate of one rank."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpeed:
    """Fused causal attention, forward, or forward and backward together."""

    precision: str
    samples: int
    heads: int
    tokens: int
    """Queries and keys of one sample."""
    head_size: int
    backward: bool
    ranks: int = 1
    threads: int = 1
    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "samples", "heads", "tokens", "head_size", "ranks", "threads")
        _RULES.above_zero(self, "seconds")
        _RULES.at_least(self, 0, "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeed:
    """Element-wise work: `add` makes a new tensor of two, as an operator of a model does; `adamw` renews weights."""

    work: Literal["add", "adamw"]
    elements: int
    """fp32."""
    ranks: int = 1
    threads: int = 1
    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "elements", "ranks", "threads")
        _RULES.above_zero(self, "seconds")
        _RULES.at_least(self, 0, "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """One block of a decoder, forward and backward: what the other figures must add up to."""

    precision: str
    samples: int
    tokens: int
    hidden_size: int
    heads: int
    ffn_size: int
    ranks: int = 1
    threads: int = 1
    forward_seconds: float
    backward_seconds: float
    spread: float = 0.0
    """Relative spread of both together."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "samples", "tokens", "hidden_size", "heads", "ffn_size", "ranks", "threads")
        _RULES.above_zero(self, "forward_seconds", "backward_seconds")
        _RULES.at_least(self, 0, "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one node's devices.  Ranks worked at the same time, each with its threads."""

    matrix: tuple[MatrixSpeed, ...] = ()
    attention: tuple[AttentionSpeed, ...] = ()
    memory: tuple[MemorySpeed, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    operator_seconds: float = 0.0
    """Time of an operator on next to no data."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "operator_seconds")

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """(ranks, threads) that were measured, each once."""
        rows = (*self.matrix, *self.memory, *self.blocks)
        return tuple(dict.fromkeys((row.ranks, row.threads) for row in rows))
