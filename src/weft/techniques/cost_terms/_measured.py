"""What `weft probe` measured, as functions of shape and size: matrix products, attention, memory, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.config.cluster import AttentionSpeed, BlockTime, Devices, MatrixSpeed, MemorySpeed

_NEAR = 0.1
"""Squared distance, in doublings of a size, within which a measurement counts fully."""
_ADD_BYTES = 12
"""Bytes per fp32 element of `add`: two reads and a write."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of work on one rank, while as many others work beside it as the layout has."""

    matrix: tuple[MatrixSpeed, ...]
    attention: tuple[AttentionSpeed, ...]
    memory: tuple[MemorySpeed, ...]
    blocks: tuple[BlockTime, ...]
    operator_seconds: float
    scale: float
    """Factor on all times: cores that a measured rank had, over those that a rank of the layout has."""

    @classmethod
    def of(cls, devices: Devices, threads: float) -> Speeds | None:
        """Return the measurements that are nearest to ranks with `threads` cores each; None where there are none.

        Accelerators have one setting of interest: all devices of the node at work.
        """
        measured = devices.measured
        if measured is None or not measured.settings:
            return None
        cores = devices.count
        ranks = cores if devices.kind != "cpu" else max(1, round(cores / threads))
        num_threads = threads if devices.kind == "cpu" else 1.0

        def distance(setting: tuple[int, int]) -> float:
            return abs(math.log2(setting[0] / ranks)) + abs(math.log2(_share(setting, cores) / num_threads))

        nearest = min(measured.settings, key=distance)
        scale = _share(nearest, cores) / num_threads if devices.kind == "cpu" else 1.0
        return cls(
            tuple(row for row in measured.matrix if (row.ranks, row.threads) == nearest),
            tuple(row for row in measured.attention if (row.ranks, row.threads) == nearest),
            tuple(row for row in measured.memory if (row.ranks, row.threads) == nearest),
            tuple(row for row in measured.blocks if (row.ranks, row.threads) == nearest),
            measured.operator_seconds,
            scale,
        )

    def product_seconds(self, m: float, n: float, k: float, precision: str) -> float | None:
        """Of one matrix product M×K by K×N; None where this precision was not measured.

        FLOPs over the best speed and the cost of a call, times how far products of like shape were from that: each
        measured one counts by its nearness in log₂ of M, N and K.
        """
        rows = [row for row in self.matrix if row.precision == precision]
        if not rows:
            return None
        best = max(row.flops_per_second for row in rows)

        def plain(flops: float) -> float:
            return flops / best + self.operator_seconds

        here = _doublings(m, n, k)
        pairs = [
            (_nearness(here, _doublings(row.m, row.n, row.k)), row.seconds / plain(2.0 * row.m * row.n * row.k))
            for row in rows
        ]
        return plain(2.0 * m * n * k) * _mean(pairs) * self.scale

    def attention_seconds(
        self, samples: float, heads: float, tokens: float, head_size: float, precision: str, *, backward: bool
    ) -> float | None:
        """Of fused causal attention, forward, or backward alone."""
        forward = self._attention(samples, heads, tokens, head_size, precision, backward=False)
        if forward is None or not backward:
            return forward
        both = self._attention(samples, heads, tokens, head_size, precision, backward=True)
        return None if both is None else max(both - forward, forward)

    def _attention(
        self, samples: float, heads: float, tokens: float, head_size: float, precision: str, *, backward: bool
    ) -> float | None:
        rows = [row for row in self.attention if row.precision == precision and row.backward == backward]
        if not rows:
            return None

        def flops(samples: float, heads: float, tokens: float, head_size: float) -> float:
            return samples * heads * tokens * tokens * head_size

        here = _doublings(tokens, head_size)
        pairs = [
            (
                _nearness(here, _doublings(row.tokens, row.head_size)),
                row.seconds / flops(row.samples, row.heads, row.tokens, row.head_size),
            )
            for row in rows
        ]
        return flops(samples, heads, tokens, head_size) * _mean(pairs) * self.scale

    def moved_seconds(self, size_bytes: float) -> float | None:
        """Of an operator that reads and writes `size_bytes` in all, its call included."""
        return self._elementwise("add", size_bytes / _ADD_BYTES)

    def update_seconds(self, elements: float) -> float | None:
        """Of AdamW over fp32 masters."""
        return self._elementwise("adamw", elements)

    def _elementwise(self, work: str, elements: float) -> float | None:
        points = sorted((float(row.elements), row.seconds) for row in self.memory if row.work == work)
        return _along(points, elements) * self.scale if points else None


def _share(setting: tuple[int, int], cores: int) -> float:
    """Cores that each rank of a setting has for itself."""
    ranks, threads = setting
    return min(threads, cores / ranks)


def _doublings(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(max(1.0, size)) for size in sizes)


def _nearness(here: Sequence[float], there: Sequence[float]) -> float:
    """Inverse square of the distance, bounded."""
    return 1.0 / (_NEAR + sum((a - b) ** 2 for a, b in zip(here, there, strict=True))) ** 2


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Weighted geometric mean of (weight, value)."""
    total = sum(weight for weight, _ in pairs)
    return math.exp(sum(weight * math.log(value) for weight, value in pairs) / total)


def _along(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate a curve's logarithms; in proportion beyond its last point, and below its first no less than that."""
    (x0, y0), *_ = points
    if at <= x0:
        return y0
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if at <= x1:
            return y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
    x1, y1 = points[-1]
    return y1 * at / x1
