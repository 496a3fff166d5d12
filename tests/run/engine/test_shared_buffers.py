"""Gradients and `fully_shard`'s buffers in shared memory: read where they lie, with the same bits, and given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, plan_of, recipe_of
from pool import RankPool

from weft.comm.shared_memory import shared_memory_group
from weft.comm.shared_memory.group import SharedMemoryGroup

STEPS = 3


@contextmanager
def _ordinary_memory() -> Iterator[None]:
    """As where the group's memory is full."""
    allocate = SharedMemoryGroup.allocate_if_possible
    SharedMemoryGroup.allocate_if_possible = lambda *arguments: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedMemoryGroup.allocate_if_possible = allocate  # type: ignore[method-assign]


def _groups(training: Training) -> list[Any]:
    groups = {id(g): g for g in (shared_memory_group(training.mesh[n].group) for n in ("data", "shard", "replicate"))}
    return [group for group in groups.values() if group is not None]


def _trained(layout: dict[str, int], precision: str) -> tuple[Seen, int, int, int]:
    """What was seen; calls that read tensors where they lie; bytes of the arenas once the store is closed, and once the
    model is gone."""
    recipe = recipe_of(precision, hidden_size=64, ffn_size=128, vocabulary_size=512)
    training = Training(recipe, plan_of(precision, bucket_bytes=1 << 18, **layout))
    groups = _groups(training)
    assert groups, "these ranks share no memory"
    before = sum(group.engine.in_place_calls for group in groups)  # the default group stays for the next
    for step in range(STEPS):
        training.step(step)
    seen = training.finished()
    training.state.close()
    gc.collect()
    closed = sum(group.engine.arena_taken_bytes for group in groups)
    calls = sum(group.engine.in_place_calls for group in groups) - before
    del training
    gc.collect()
    return seen, calls, closed, sum(group.engine.arena_taken_bytes for group in groups)


def _both(layout: dict[str, int], precision: str) -> dict[str, Any]:
    inside = _trained(layout, precision)
    with _ordinary_memory():
        outside = _trained(layout, precision)
    pairs = zip(inside[0].state, outside[0].state, strict=True)
    return {
        "same": all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)
        and inside[0].losses == outside[0].losses
        and inside[0].norms == outside[0].norms,
        "in place": inside[1],
        "staged only": outside[1],
        "held by the model": inside[2],
        "left": inside[3],
    }


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 0, "replicate": 2},
        {"zero": 1, "replicate": 2},
        {"zero": 2, "shard": 2},
        {"zero": 3, "shard": 2},
        {"zero": 3, "shard": 2, "replicate": 2},
    ],
    ids=lambda layout: "-".join(f"{name}{value}" for name, value in layout.items()),
)
def test_buffers_in_shared_memory_change_no_bit(layout: dict[str, int], precision: str) -> None:
    """In processes of their own: torch remembers the meshes of sharded models, and with them their groups."""
    world = layout.get("replicate", 1) * layout.get("shard", 1)
    with closing(RankPool(world)) as pool:
        outcomes = pool.run(world, _both, layout, precision, backend="cpu:weft")
    for results in outcomes:
        assert results["same"]
        assert results["in place"] > 0
        assert results["staged only"] == 0
        assert results["held by the model"] == 0 or layout["zero"] == 3
        assert results["left"] == 0
