"""Two processes that share the suite run every test once."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import halves
import pytest


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_file_is_claimed_once(request: pytest.FixtureRequest, tmp_path: Path, seed: int, pooled: bool) -> None:
    """In whatever order the two ask for their next test."""
    rng = random.Random(seed)
    items = request.session.items
    of_kind = [item for item in items if halves.is_pooled(item) is pooled]
    sides = [halves.claimed(items, tmp_path, pooled=pooled, backwards=backwards) for backwards in (False, True)]
    run: list[list[pytest.Item]] = [[], []]
    open_sides = [0, 1]
    while open_sides:
        side = rng.choice(open_sides)
        if (item := next(sides[side], None)) is None:
            open_sides.remove(side)
        else:
            run[side].append(item)
    assert sorted(chain(*run), key=of_kind.index) == of_kind
    assert not {item.path for item in run[0]} & {item.path for item in run[1]}


@pytest.mark.parametrize("ranks", [2])
def test_a_case_that_is_called_as_a_fixture_needs_no_pool(request: pytest.FixtureRequest, ranks: int) -> None:
    assert isinstance(request.node, pytest.Item)
    assert not halves.is_pooled(request.node)
