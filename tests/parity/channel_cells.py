"""Cells of networks whose channels are shared out: `ALL` is for `make parity`, `DRAWN` for every run of the tests.

Batch norms want a data rank's samples of a step in one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell, plan
from channel_models import NETS
from matrix import ZERO, covering, techniques

from weft.config.plan import Plan
from weft.config.recipe import ConvNetShape, ModelRecipe

MODELS = {name: ModelRecipe(factory="channel_models:build_channels", arguments={"net": name}) for name in NETS} | {
    "convnet": ModelRecipe(shape=ConvNetShape(num_layers=4, channels=8)),
    "convnet_groups": ModelRecipe(shape=ConvNetShape(num_layers=4, channels=32, norm="group")),
}
FOURFOLD = ("basic", "bottleneck", "grouped", "mobile", "multiplied", "tied", "frozen")
"""Four ranks can share their channels."""


def _cells(model: str, *plans: Plan) -> list[Cell]:
    return [Cell(model, chosen) for chosen in plans]


def _data(zero: int, **others: Any) -> Plan:
    axes: dict[str, Any] = {"replicate": 2} if zero == 0 else {"shard": 2}
    return plan(tensor=2, zero=zero, micro=6, **axes, **others)


def alone() -> Iterator[Cell]:
    """The tensor axis and nothing else."""
    for model in MODELS:
        yield from _cells(model, plan(tensor=2, micro=12))
    for model in FOURFOLD:
        yield from _cells(model, plan(tensor=4, micro=12))
    yield from _cells("convnet_groups", plan(tensor=4, micro=4), plan(tensor=2, micro=1))


def with_data() -> Iterator[Cell]:
    """Data ranks share the statistics of the same channels."""
    for zero in ZERO:
        for model in ("basic", "mobile", "convnet"):
            yield from _cells(model, _data(zero))
    for model in ("bottleneck", "grouped", "plain", "multiplied", "shuffled", "frozen", "tied", "line", "volume"):
        yield from _cells(model, _data(1), _data(3))
    yield from _cells("convnet_groups", plan(tensor=2, shard=2, zero=2, micro=2), plan(tensor=2, replicate=2, micro=3))
    yield from _cells("convnet_groups", plan(tensor=2, shard=2, zero=1, micro=3, shares=(3, 1)))
    yield from _cells("mobile", plan(tensor=2, replicate=2, shard=2, zero=3, micro=3))


def with_others() -> Iterator[Cell]:
    """Recomputation, stages, and both beside data ranks."""
    for recompute in ("full", "selective"):
        for model in ("basic", "mobile"):  # of the others nothing says what their blocks are
            yield from _cells(model, plan(tensor=2, micro=12, recompute=recompute))
        yield from _cells("bottleneck", _data(3, recompute=recompute))
    for model in ("basic", "bottleneck", "mobile", "convnet"):
        yield from _cells(model, plan(tensor=2, pipeline=2, micro=12))
    yield from _cells("convnet_groups", plan(tensor=2, pipeline=2, micro=3))
    yield from _cells("convnet_groups", plan(tensor=2, pipeline=2, micro=3, schedule="interleaved_1f1b", chunks=2))
    yield from _cells("convnet", _data(1, pipeline=2), _data(3, pipeline=2))


ALL = tuple(dict.fromkeys((*alone(), *with_data(), *with_others())))
DRAWN = covering([cell for cell in ALL if cell.world <= 4], lambda cell: techniques(cell) | {cell.model})
