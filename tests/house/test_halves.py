"""Two processes that share the suite run every test once."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import halves
import pytest


@pytest.mark.parametrize("seed", range(3))
def test_every_file_is_claimed_once(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> None:
    """In whatever order the two ask for their next test."""
    rng = random.Random(seed)
    others = [item for item in request.session.items if not halves.is_pooled(item)]
    sides = [halves.claimed(request.session.items, tmp_path, backwards=backwards) for backwards in (False, True)]
    run: list[list[pytest.Item]] = [[], []]
    open_sides = [0, 1]
    while open_sides:
        side = rng.choice(open_sides)
        if (item := next(sides[side], None)) is None:
            open_sides.remove(side)
        else:
            run[side].append(item)
    assert sorted(chain(*run), key=others.index) == others
    assert not {item.path for item in run[0]} & {item.path for item in run[1]}
