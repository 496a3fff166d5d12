"""What a device does how fast: matrix products, attention, memory, one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.cluster import AttentionSpeed, BlockTime, MatrixSpeed, Measured, MemorySpeed
from weft.models import build_reference
from weft.probe._timing import Timing, slowest, time_runs
from weft.recipe import DecoderShape

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_CPU_SHAPES = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (16, 512, 512),
    (128, 512, 512),
    (512, 128, 128),
    (512, 256, 256),
    (2048, 256, 256),
    (2048, 512, 512),
    (2048, 1536, 512),
    (512, 1536, 2048),
    (512, 512, 2048),
    (1024, 4096, 256),
)
"""M, N, K: squares, tokens by layers, weights' gradients (tokens are K), a head."""
_GPU_SHAPES = (
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16, 4096, 4096),
    (512, 4096, 4096),
    (4096, 1024, 4096),
    (4096, 4096, 1024),
    (4096, 14336, 4096),
    (8192, 28672, 4096),
    (4096, 4096, 8192),
    (2048, 32768, 2048),
)
_CPU_ATTENTION = ((4, 8, 128, 32), (4, 8, 256, 64), (1, 8, 1024, 64))
_GPU_ATTENTION = ((4, 16, 1024, 64), (4, 16, 2048, 128), (1, 32, 8192, 128))
"""Samples, heads, tokens, head size."""
_CPU_ELEMENTS = (1 << 14, 1 << 18, 1 << 20, 1 << 24)
_GPU_ELEMENTS = (1 << 20, 1 << 24, 1 << 28)
_CPU_UPDATES = (1 << 18, 1 << 22)
_GPU_UPDATES = (1 << 22, 1 << 27)
_CPU_BLOCKS = ((1, 16, 64, 2), (4, 128, 128, 4), (8, 128, 256, 4), (4, 256, 512, 8))
_GPU_BLOCKS = ((4, 2048, 2048, 16), (1, 4096, 4096, 32))
"""Samples, tokens, hidden size, heads.  The smallest shows what a block costs whatever its size."""


class _Sizes(NamedTuple):
    shapes: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    elements: tuple[int, ...]
    updates: tuple[int, ...]
    blocks: tuple[tuple[int, int, int, int], ...]


class Concurrency(NamedTuple):
    """How many ranks of each node work at the same time, each with how many threads."""

    ranks: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where one rank measures: its device, its peers, and how long each figure may take."""

    device: torch.device
    setting: Concurrency
    takes_part: bool
    """Whether this rank is one of those that work; the others wait for it at the end."""
    group: dist.ProcessGroup | None
    """Group of all ranks that work; None: there is only one."""
    seconds: float
    """Time for one figure."""

    def run(self, work: Callable[[], object]) -> Timing:
        """Time `work` on all ranks that take part, from the same moment on."""
        if self.group is not None:
            dist.barrier(group=self.group)
        return time_runs(work, self.device, self.seconds)


@dataclass(frozen=True, slots=True)
class _Figure:
    """One thing to measure: how to prepare it, and how to write it down."""

    prepare: Callable[[], Sequence[Callable[[], object]]]
    """Builds its tensors and returns pieces of work, each timed on its own."""
    parts: int
    write: Callable[[Sequence[Timing]], object]


def measure_devices(bench: Bench, precisions: Sequence[str]) -> Measured:
    """Measure one setting.  Call on all ranks of the job; every rank gets the slowest one's figures."""
    torch.set_num_threads(bench.setting.threads)
    figures = [*_matrices(bench, precisions), *_attentions(bench, precisions), *_memories(bench)]
    figures += _blocks(bench, precisions)
    timings: list[Timing] = []
    for figure in figures:
        if bench.takes_part:
            timings += [bench.run(work) for work in figure.prepare()]
        else:
            timings += [Timing(0.0, 0.0)] * figure.parts
    rows: list[object] = []
    agreed = iter(slowest(timings))
    for figure in figures:
        rows.append(figure.write([next(agreed) for _ in range(figure.parts)]))
    return Measured(
        matrix=tuple(row for row in rows if isinstance(row, MatrixSpeed)),
        attention=tuple(row for row in rows if isinstance(row, AttentionSpeed)),
        memory=tuple(row for row in rows if isinstance(row, MemorySpeed)),
        blocks=tuple(row for row in rows if isinstance(row, BlockTime)),
        operator_seconds=next(row for row in rows if isinstance(row, float)),
    )


def number_of_figures(device: torch.device, precisions: Sequence[str]) -> int:
    """How many timings one setting takes."""
    sizes = _sizes(device)
    each = len(sizes.shapes) + 2 * len(sizes.attention) + 2 * len(sizes.blocks)
    return len(precisions) * each + len(sizes.elements) + len(sizes.updates) + 1


def _sizes(device: torch.device) -> _Sizes:
    if device.type == "cpu":
        return _Sizes(_CPU_SHAPES, _CPU_ATTENTION, _CPU_ELEMENTS, _CPU_UPDATES, _CPU_BLOCKS)
    return _Sizes(_GPU_SHAPES, _GPU_ATTENTION, _GPU_ELEMENTS, _GPU_UPDATES, _GPU_BLOCKS)


def _matrices(bench: Bench, precisions: Sequence[str]) -> list[_Figure]:
    def figure(precision: str, m: int, n: int, k: int) -> _Figure:
        def prepare() -> Sequence[Callable[[], object]]:
            left = torch.randn(m, k, device=bench.device, dtype=DTYPES[precision])
            right = torch.randn(n, k, device=bench.device, dtype=DTYPES[precision])  # as a linear layer keeps it
            return [lambda: F.linear(left, right)]

        def write(timings: Sequence[Timing]) -> MatrixSpeed:
            seconds, spread = _rounded(timings[0])
            ranks, threads = bench.setting
            return MatrixSpeed(
                precision=precision, m=m, n=n, k=k, ranks=ranks, threads=threads, seconds=seconds, spread=spread
            )

        return _Figure(prepare, 1, write)

    return [figure(precision, *shape) for precision in precisions for shape in _sizes(bench.device).shapes]


def _attentions(bench: Bench, precisions: Sequence[str]) -> list[_Figure]:
    def figure(precision: str, samples: int, heads: int, tokens: int, head_size: int, backward: bool) -> _Figure:
        def prepare() -> Sequence[Callable[[], object]]:
            shape = (samples, heads, tokens, head_size)
            made = [torch.randn(shape, device=bench.device, dtype=DTYPES[precision]) for _ in range(4)]
            query, key, value = (one.requires_grad_(backward) for one in made[:3])

            def work() -> object:
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                return torch.autograd.grad(mixed, (query, key, value), made[3]) if backward else mixed

            return [work]

        def write(timings: Sequence[Timing]) -> AttentionSpeed:
            seconds, spread = _rounded(timings[0])
            ranks, threads = bench.setting
            return AttentionSpeed(
                precision=precision,
                samples=samples,
                heads=heads,
                tokens=tokens,
                head_size=head_size,
                backward=backward,
                ranks=ranks,
                threads=threads,
                seconds=seconds,
                spread=spread,
            )

        return _Figure(prepare, 1, write)

    shapes = _sizes(bench.device).attention
    return [figure(precision, *shape, back) for precision in precisions for shape in shapes for back in (False, True)]


def _memories(bench: Bench) -> list[_Figure]:
    ranks, threads = bench.setting

    def add(elements: int) -> _Figure:
        def prepare() -> Sequence[Callable[[], object]]:
            left, right = (torch.randn(elements, device=bench.device) for _ in range(2))
            return [lambda: left + right]

        return _Figure(prepare, 1, lambda timings: row("add", elements, timings[0]))

    def update(elements: int) -> _Figure:
        def prepare() -> Sequence[Callable[[], object]]:
            weight = nn.Parameter(torch.randn(elements, device=bench.device))
            weight.grad = torch.randn_like(weight)
            optimizer = torch.optim.AdamW([weight], fused=True)
            return [optimizer.step]

        return _Figure(prepare, 1, lambda timings: row("adamw", elements, timings[0]))

    def row(work: str, elements: int, timing: Timing) -> MemorySpeed:
        seconds, spread = _rounded(timing)
        speed = MemorySpeed(work="add", elements=elements, ranks=ranks, threads=threads, seconds=seconds, spread=spread)
        return speed if work == "add" else replace(speed, work="adamw")

    def tiny() -> Sequence[Callable[[], object]]:
        one = torch.ones(16, device=bench.device, requires_grad=True)

        def hundred() -> Tensor:
            value = one
            for _ in range(100):
                value = value * 1.0
            return value

        return [hundred]

    sizes = _sizes(bench.device)
    smallest = _Figure(tiny, 1, lambda timings: _three_digits(timings[0].seconds / 100))
    return [*(add(size) for size in sizes.elements), *(update(size) for size in sizes.updates), smallest]


def _blocks(bench: Bench, precisions: Sequence[str]) -> list[_Figure]:
    def figure(precision: str, samples: int, tokens: int, hidden: int, heads: int) -> _Figure:
        shape = DecoderShape(
            num_layers=1,
            hidden_size=hidden,
            num_heads=heads,
            ffn_size=3 * hidden,
            vocabulary_size=2,
            sequence_length=tokens,
        )

        def prepare() -> Sequence[Callable[[], object]]:
            return _block_works(bench.device, shape, samples, DTYPES[precision])

        def write(timings: Sequence[Timing]) -> BlockTime:
            (forward, forward_spread), (both, both_spread) = (_rounded(timing) for timing in timings)
            ranks, threads = bench.setting
            return BlockTime(
                precision=precision,
                samples=samples,
                tokens=tokens,
                hidden_size=hidden,
                heads=heads,
                ffn_size=3 * hidden,
                ranks=ranks,
                threads=threads,
                forward_seconds=forward,
                backward_seconds=_three_digits(max(both - forward, 0.1 * forward)),
                spread=max(forward_spread, both_spread),
            )

        return _Figure(prepare, 2, write)

    return [figure(precision, *shape) for precision in precisions for shape in _sizes(bench.device).blocks]


def _block_works(
    device: torch.device, shape: DecoderShape, samples: int, dtype: torch.dtype
) -> Sequence[Callable[[], object]]:
    """A block's forward as training does it, and forward and backward together."""
    decoder = build_reference(shape).module.to_empty(device=device).to(dtype)
    block = decoder.get_submodule("blocks.0")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    hidden = torch.randn(samples, shape.sequence_length, shape.hidden_size, device=device, dtype=dtype)
    hidden.requires_grad_()
    angles = torch.rand(shape.sequence_length, shape.hidden_size // shape.num_heads, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    gradient = torch.randn_like(hidden)
    inputs = [hidden, *block.parameters()]

    def forward() -> Tensor:
        return block(hidden, cos, sin, None)

    return [forward, lambda: torch.autograd.grad(forward(), inputs, gradient)]


def _rounded(timing: Timing) -> Timing:
    return Timing(_three_digits(timing.seconds), round(timing.spread, 3))


def _three_digits(value: float) -> float:
    """Rounded as far as it was measured."""
    return float(f"{value:.4g}")
