"""Altered checkpoints of each tier: what was altered is found, nothing in it runs, and the save before is used.

`make alterations` tries 10,000 of each tier; its counts lie in `benchmarks/results/alterations.json`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from altered import TIERS, try_many

NUMBER = {"disk": 150, "memory": 150, "store": 12}
FIRST_SEED = 1_000_000
"""Behind those of `make alterations`."""


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_altered_is_found_and_the_save_before_is_used(tier: str, tmp_path: Path) -> None:
    counts = try_many(tier, range(FIRST_SEED, FIRST_SEED + NUMBER[tier]), tmp_path)
    assert counts["found"] > 0.7 * NUMBER[tier]
    assert counts.total() == NUMBER[tier]
