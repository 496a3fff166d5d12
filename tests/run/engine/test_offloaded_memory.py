"""Where shards, gradients and activations lie that are offloaded, and what a rank has in memory of its own."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_kit import ADAMW, Training, plan_of, recipe_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.config.plan import MemoryPlan, Plan

WIDE: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 1024, "sequence_length": 8,
}  # fmt: skip
"""12.6 million parameters: 100 MB of fp32 state on each of two ranks, of which a block has 8."""
LONG: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 256, "sequence_length": 384,
}  # fmt: skip
"""Of 3,072 tokens a block keeps some 20 MB for its backward, in tensors that a C library keeps when they are freed."""

SECONDS = 180.0
"""Limit of a case, of which each builds two models."""


def away(plan: Plan, what: str) -> Plan:
    return replace(plan, memory=MemoryPlan(offload=what, offload_to="disk"))  # type: ignore[arg-type]


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lies_in_a_file(tensor: Tensor) -> bool:
    """Whether a tensor's memory is pages of a file that has no name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"(\w+)-(\w+) ...(.) .*\(deleted\)$", line)
        if match and int(match[1], 16) <= tensor.data_ptr() < int(match[2], 16):
            return match[3] == "s"
    return False


def landed(plan: Plan, shape: dict[str, Any]) -> tuple[dict[str, list[bool]], dict[str, bool], list[str]]:
    """By parameter, whether each of its gradients lay in a file once it was accumulated, and whether the shard does;
    and those whose gradient is no other between two microbatches."""
    training = Training(recipe_of("fp32", ADAMW, steps=2, **shape), plan)
    results, places, moved = dict[str, list[bool]](), dict[str, int](), list[str]()

    def note(name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        local = gradient.to_local()
        results.setdefault(name, []).append(lies_in_a_file(local))
        if places.setdefault(name, local.data_ptr()) != local.data_ptr():
            moved.append(name)

    shards = dict[str, bool]()
    for name, parameter in training.state.model.module.named_parameters():
        assert isinstance(parameter, DTensor)
        shards[name] = lies_in_a_file(parameter.to_local())
        parameter.register_post_accumulate_grad_hook(partial(note, name))
    for step in range(2):
        training.step(step)
    training.state.close()
    return results, shards, moved


@pytest.mark.parametrize("every", ["auto", "step"])
def test_gradients_land_beside_their_shards(ranks: Any, every: str) -> None:
    plan = away(plan_of("fp32", shard=2, zero=3, micro=2, every=every), "parameters")
    for results, shards, moved in ranks.run(2, landed, plan, {"vocabulary_size": 33}):
        uneven = [name for name in shards if "embedding" in name or "head" in name]  # 33 rows on 2 ranks
        assert uneven
        assert results.keys() == shards.keys()
        for name in shards:
            assert shards[name] == (name not in uneven), name
            assert results[name] == [name not in uneven] * len(results[name]), name
        assert len(results["norm.weight"]) == (4 if every == "auto" else 2)
        assert [name for name in moved if name not in uneven] == []


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def own_bytes() -> int:
    """Memory of this process that is no page of a file: its own, and what it shares with others."""
    text = Path("/proc/self/status").read_text()
    return sum(int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) for name in ("RssAnon", "RssShmem")) << 10  # type: ignore[index]


@contextmanager
def watched(peaks: list[int]) -> Generator[None]:
    """Note the most memory of its own that the process ever had within, looked at every few milliseconds."""
    before, most, ended = own_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.003):
            most.append(own_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        peaks.append(max(most) - before)


def peaks_of(plans: tuple[Plan, Plan], shape: dict[str, Any]) -> list[int]:
    """Memory that each of two trainings takes at most, beyond what there was before it was built.  The smaller comes
    first, for what the C library keeps of the larger one's heap would be touched again; and twice, for the first of
    them brings modules along.  The ranks have run nothing else: in the holes that 200 tests had left in a heap, freed
    blocks stayed and new ones lay beside them (154 MB in place of 50, EPYC, 2 cores, 2026-11-26)."""
    _, smaller, larger = _peaks((plans[0], *plans), shape)
    return [smaller, larger]


def _peaks(plans: Iterable[Plan], shape: dict[str, Any]) -> list[int]:
    peaks = list[int]()
    for plan in plans:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with watched(peaks):
            training = Training(recipe_of("fp32", ADAMW, steps=3, **shape), plan)
            training.step(0)
            training.step(1)
        training.state.close()
        del training
    return peaks


def test_weights_and_gradients_are_not_in_memory(ranks: Any) -> None:
    plan = plan_of("fp32", shard=2, zero=3, micro=4)
    with ranks.fresh() as unused:
        results = unused.run(2, peaks_of, (away(plan, "parameters"), plan), WIDE, timeout=SECONDS)
    for other, plain in results:
        assert plain > 95e6
        assert other < 0.5 * plain


def test_activations_are_not_in_memory(ranks: Any) -> None:
    plan = plan_of("fp32", micro=8)
    with ranks.fresh() as unused:
        ((other, plain),) = unused.run(1, peaks_of, (away(plan, "activations"), plan), LONG, timeout=SECONDS)
    assert plain > 200e6
    assert other < 0.35 * plain
