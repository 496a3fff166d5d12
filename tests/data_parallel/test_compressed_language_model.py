"""A small language model ends where it does without compression; and does not, where feedback is needed and missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import small_language_model

from weft.comm.compress import Compression

SEEDS, STEPS = (1, 2, 3), 300
CODECS: Mapping[str, Compression | None] = {
    "none": None,
    "bf16": Compression(codec="bf16"),
    "int8": Compression(codec="int8"),
    "powersgd": Compression(codec="powersgd", powersgd_rank=4),
    "topk": Compression(codec="topk", topk_share=0.01),
    "powersgd without feedback": Compression(codec="powersgd", powersgd_rank=4, feedback=False),
    "topk without feedback": Compression(codec="topk", topk_share=0.01, feedback=False),
}
LIMITS: Mapping[str, float] = {"bf16": 0.01, "int8": 0.01, "powersgd": 0.03, "topk": 0.06}
"""Relative gaps.  Top-k of 1 % is behind at first: an element waits a hundred steps on average until it is sent."""


def study() -> dict[str, list[float]]:
    """Final validation losses by codec, one for each seed; without feedback for the first seed only."""
    data = small_language_model.text()
    return {
        name: [
            small_language_model.final_loss(codec, seed, STEPS, data)
            for seed in (SEEDS if codec is None or codec.feedback else SEEDS[:1])
        ]
        for name, codec in CODECS.items()
    }


@pytest.mark.slow
def test_a_language_model_ends_where_it_does_without_compression(ranks: Any) -> None:
    found = ranks.run(2, study, timeout=500.0)  # of a hang; a busy machine takes its time
    assert found[0] == found[1], "ranks drifted apart"
    losses = found[0]
    gaps = {
        name: sum(mine / plain - 1 for mine, plain in zip(mines, losses["none"], strict=False)) / len(mines)
        for name, mines in losses.items()
    }
    for name, limit in LIMITS.items():
        assert gaps[name] <= limit, gaps
    for name in ("powersgd", "topk"):
        assert gaps[f"{name} without feedback"] > LIMITS[name], f"the test would not notice missing feedback: {gaps}"
