"""A search among fewer plans never finds a better one; `restrictions.py` sweeps all pairs and all restrictions."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from restrictions import PAIRS, REFUSALS, Case, drawn, is_better, restrictions


@pytest.mark.parametrize(
    ("name", "count"), [("gpt2 on 4xcpu", 8), ("llama-3.2-1b on 4xh100", 6), ("llama-2-7b on 8xa100-40gb", 4)]
)
def test_a_restricted_search_is_never_better(name: str, count: int) -> None:
    case = Case(name)
    whole = case.best(case.space)
    for what, space in drawn(list(restrictions(case.space)), count, Random(11)):
        assert not is_better(case.best(space), whole, what), what


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        # Some blocks computed again and the optimizer offloaded, where neither alone is enough or as fast.
        ("llama-3.1-8b on 2xh100, 32768", "offloads", "optimizer"),
        # Under ZeRO-3 nothing is reduced in buckets.
        ("qwen3-30b-a3b on 4x8xh100", "bucket_bytes", 300_000_000),
    ],
)
def test_what_a_sweep_found(name: str, setting: str, value: object) -> None:
    case = Case(name)
    whole = case.best(case.space)
    changes: dict[str, Any] = {setting: (value,)}
    assert not is_better(case.best(replace(case.space, **changes)), whole, setting)


@pytest.mark.parametrize("name", PAIRS)
def test_no_pair_has_a_restriction_that_is_better(name: str) -> None:
    case = Case(name)
    whole = case.best(case.space)
    for what, space in drawn(list(restrictions(case.space)), 5, Random(name)):
        assert not is_better(case.best(space), whole, what), what


LEFT_OUT: dict[str, dict[str, Any]] = {
    "sequence parallelism": {"sequence_parallels": (False,)},
    "waiting elsewhere": {"offloads": ("none",)},
    "fused losses": {"fused_losses": (False,)},
    "context ranks": {"contexts": (1,)},
    "grids": {"tensor_schemes": ("1d",)},
    "other schedules": {"schedules": ("1f1b",)},
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("name", ["llama-3.2-1b on 4xh100", "llama-3.1-8b on 2xh100, 32768", "gpt2 on 4xcpu"])
def test_what_is_refused_is_as_if_it_were_not_there(name: str, what: str) -> None:
    """A refused plan hides none that is taken."""
    case = Case(name)
    refused = case.best(replace(case.space, refuses=REFUSALS[what]))
    assert refused == pytest.approx(case.best(replace(case.space, **LEFT_OUT[what])), rel=1e-9)


def test_there_are_thirty_pairs() -> None:
    assert len(PAIRS) >= 30
