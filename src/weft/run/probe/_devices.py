"""Measures a device: matrix products, attention, memory, one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.cluster import AttentionSpeed, BlockTime, MatrixSpeed, Measured, MemorySpeed
from weft.config.recipe import DecoderShape
from weft.model.build import build_reference
from weft.run.probe._timing import Timing, slowest, time_runs

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _BenchSizes(NamedTuple):
    """Sizes at which a kind of device is measured."""

    shapes: tuple[tuple[int, int, int], ...]
    """M, N, K: squares, tokens by layers, weights' gradients (tokens are K), a head."""
    attention: tuple[tuple[int, int, int, int], ...]
    """Samples, heads, tokens, head size."""
    elements: tuple[int, ...]
    """Elements of tensors that are added."""
    updates: tuple[int, ...]
    """Elements of parameters that AdamW updates."""
    blocks: tuple[tuple[int, int, int, int], ...]
    """Samples, tokens, hidden size, heads.  The smallest shows what a block costs whatever its size."""


_CPU_FIGURES = _BenchSizes(
    shapes=(
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
    ),
    attention=((4, 8, 128, 32), (4, 8, 256, 64), (1, 8, 1024, 64)),
    elements=(1 << 14, 1 << 18, 1 << 20, 1 << 24),
    updates=(1 << 18, 1 << 22),
    blocks=((1, 16, 64, 2), (4, 128, 128, 4), (8, 128, 256, 4), (4, 256, 512, 8)),
)
_GPU_FIGURES = _BenchSizes(
    shapes=(
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
    ),
    attention=((4, 16, 1024, 64), (4, 16, 2048, 128), (1, 32, 8192, 128)),
    elements=(1 << 20, 1 << 24, 1 << 28),
    updates=(1 << 22, 1 << 27),
    blocks=((4, 2048, 2048, 16), (1, 4096, 4096, 32)),
)


class Concurrency(NamedTuple):
    """Number of ranks that work on each node at the same time, and threads of each."""

    ranks: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBench:
    """The bench of one rank: its device, its peers, and the time for each figure."""

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
class _DeviceFigure:
    """One thing to measure: how to prepare it, and how to write it down."""

    prepare: Callable[[], Sequence[Callable[[], object]]]
    """Builds its tensors and returns pieces of work, each timed on its own."""
    write: Callable[[Sequence[Timing], Concurrency], object]
    parts: int = 1
    """Pieces of work."""


def measure_devices(bench: DeviceBench, precisions: Sequence[str]) -> Measured:
    """Measure one setting.  Call on all ranks of the job; every rank gets the slowest one's figures."""
    torch.set_num_threads(bench.setting.threads)
    figures = _figures(bench.device, precisions)
    timings: list[Timing] = []
    for figure in figures:
        if bench.takes_part:
            timings += [bench.run(work) for work in figure.prepare()]
        else:
            timings += [Timing(0.0, 0.0)] * figure.parts  # below every measurement, so the slowest is one that worked
    agreed = iter(slowest(timings))
    rows = [figure.write([next(agreed) for _ in range(figure.parts)], bench.setting) for figure in figures]
    return Measured(
        matrix=tuple(row for row in rows if isinstance(row, MatrixSpeed)),
        attention=tuple(row for row in rows if isinstance(row, AttentionSpeed)),
        memory=tuple(row for row in rows if isinstance(row, MemorySpeed)),
        blocks=tuple(row for row in rows if isinstance(row, BlockTime)),
        operator_seconds=next(row for row in rows if isinstance(row, float)),
    )


def number_of_figures(device: torch.device, precisions: Sequence[str]) -> int:
    """Return the number of timings of one setting."""
    return sum(figure.parts for figure in _figures(device, precisions))


def _figures(device: torch.device, precisions: Sequence[str]) -> list[_DeviceFigure]:
    """Everything that is measured of one setting; nothing of it is prepared yet."""
    sizes = _CPU_FIGURES if device.type == "cpu" else _GPU_FIGURES
    return [
        *(_matrix(device, precision, *shape) for precision in precisions for shape in sizes.shapes),
        *(
            _attention(device, precision, *shape, backward=backward)
            for precision in precisions
            for shape in sizes.attention
            for backward in (False, True)
        ),
        *(_addition(device, elements) for elements in sizes.elements),
        *(_update(device, elements) for elements in sizes.updates),
        _smallest(device),
        *(_block(device, precision, *shape) for precision in precisions for shape in sizes.blocks),
    ]


def _row(kind: Callable[..., object], **fields: object) -> Callable[[Sequence[Timing], Concurrency], object]:
    """Return a function that writes the timing of one kind of work down as a row of that kind."""

    def write(timings: Sequence[Timing], setting: Concurrency) -> object:
        return kind(**fields, **setting._asdict(), **_rounded(timings[0])._asdict())

    return write


def _matrix(device: torch.device, precision: str, m: int, n: int, k: int) -> _DeviceFigure:
    def prepare() -> Sequence[Callable[[], object]]:
        left = torch.randn(m, k, device=device, dtype=DTYPES[precision])
        right = torch.randn(n, k, device=device, dtype=DTYPES[precision])  # as a linear layer keeps it
        return [lambda: F.linear(left, right)]

    return _DeviceFigure(prepare, _row(MatrixSpeed, precision=precision, m=m, n=n, k=k))


def _attention(
    device: torch.device, precision: str, samples: int, heads: int, tokens: int, head_size: int, *, backward: bool
) -> _DeviceFigure:
    def prepare() -> Sequence[Callable[[], object]]:
        shape = (samples, heads, tokens, head_size)
        made = [torch.randn(shape, device=device, dtype=DTYPES[precision]) for _ in range(4)]
        query, key, value = (one.requires_grad_(backward) for one in made[:3])

        def work() -> object:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(mixed, (query, key, value), made[3]) if backward else mixed

        return [work]

    row = _row(
        AttentionSpeed,
        precision=precision,
        samples=samples,
        heads=heads,
        tokens=tokens,
        head_size=head_size,
        backward=backward,
    )
    return _DeviceFigure(prepare, row)


def _addition(device: torch.device, elements: int) -> _DeviceFigure:
    def prepare() -> Sequence[Callable[[], object]]:
        left, right = (torch.randn(elements, device=device) for _ in range(2))
        return [lambda: left + right]

    return _DeviceFigure(prepare, _row(MemorySpeed, work="add", elements=elements))


def _update(device: torch.device, elements: int) -> _DeviceFigure:
    def prepare() -> Sequence[Callable[[], object]]:
        weight = nn.Parameter(torch.randn(elements, device=device))
        weight.grad = torch.randn_like(weight)
        return [torch.optim.AdamW([weight], fused=True).step]

    return _DeviceFigure(prepare, _row(MemorySpeed, work="adamw", elements=elements))


def _smallest(device: torch.device) -> _DeviceFigure:
    """Return the figure of the smallest operator: the seconds that any operator costs, whatever its size."""

    def prepare() -> Sequence[Callable[[], object]]:
        one = torch.ones(16, device=device, requires_grad=True)

        def hundred() -> Tensor:
            value = one
            for _ in range(100):  # a chain with autograd, as a model is one: each operator waits for the one before
                value = value * 1.0
            return value

        return [hundred]

    return _DeviceFigure(prepare, lambda timings, setting: _three_digits(timings[0].seconds / 100))


def _block(device: torch.device, precision: str, samples: int, tokens: int, hidden: int, heads: int) -> _DeviceFigure:
    shape = DecoderShape(
        num_layers=1,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=3 * hidden,
        vocabulary_size=2,
        sequence_length=tokens,
    )

    def write(timings: Sequence[Timing], setting: Concurrency) -> BlockTime:
        (forward, forward_spread), (both, both_spread) = (_rounded(timing) for timing in timings)
        return BlockTime(
            precision=precision,
            samples=samples,
            tokens=tokens,
            hidden_size=hidden,
            heads=heads,
            ffn_size=3 * hidden,
            ranks=setting.ranks,
            threads=setting.threads,
            forward_seconds=forward,
            # Forward and backward are timed together, because the backward alone would keep its graph from run to run.
            backward_seconds=_three_digits(max(both - forward, 0.1 * forward)),
            spread=max(forward_spread, both_spread),
        )

    return _DeviceFigure(lambda: _block_works(device, shape, samples, DTYPES[precision]), write, parts=2)


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
