"""A small language model whose replicas step by themselves ends near where it does with sums in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import small_language_model

from weft.config.plan import DataParallelPlan

SEEDS, STEPS = (1, 2, 3), 300
WAYS: Mapping[str, DataParallelPlan | None] = {
    "sums": None,
    "local SGD": DataParallelPlan(local_steps=10, outer_learning_rate=1.0, outer_momentum=0.0),
    "DiLoCo": DataParallelPlan(local_steps=10, outer_momentum=0.5),  # 30 rounds: the default 0.9 remembers ten of them
    "one average": DataParallelPlan(local_steps=STEPS, outer_learning_rate=1.0, outer_momentum=0.0),
}
LIMITS: Mapping[str, float] = {"local SGD": 0.03, "DiLoCo": 0.03}
"""Relative gaps of the final validation loss, in the mean over the seeds."""


def study() -> dict[str, list[float]]:
    """Final validation losses by way, one for each seed; with one average at the end for the first seed only."""
    data = small_language_model.text()
    return {
        name: [
            small_language_model.final_loss(None, seed, STEPS, data, local=local)
            for seed in (SEEDS[:1] if name == "one average" else SEEDS)
        ]
        for name, local in WAYS.items()
    }


def test_a_language_model_ends_near_where_it_does_with_sums(ranks: Any) -> None:
    found = ranks.run(2, study, timeout=300.0)  # of a hang; a busy machine takes its time
    assert found[0] == found[1], "ranks drifted apart"
    losses = found[0]
    gaps = {
        name: sum(mine / plain - 1 for mine, plain in zip(mines, losses["sums"], strict=False)) / len(mines)
        for name, mines in losses.items()
    }
    for name, limit in LIMITS.items():
        assert gaps[name] <= limit, (gaps, losses)
    assert gaps["one average"] > max(LIMITS.values()), f"the test would not notice missing averages: {gaps}"
