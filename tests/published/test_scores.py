"""Errors, order within sweeps, and judgement of memory."""

from __future__ import annotations

from itertools import combinations

import pytest
from benchmarks.published._metrics import Confusion, errors_of, kendall_tau, quantile
from hypothesis import given
from hypothesis import strategies as st

POSITIVE = st.floats(0.01, 100.0)


def test_errors() -> None:
    found = errors_of([1.0, 2.0, 4.0], [1.0, 1.0, 8.0])
    assert found is not None
    assert (found.count, found.median, found.mean) == (3, 0.5, 0.5)
    assert found.p90 == pytest.approx(0.9)
    assert found.bias == 0.0
    assert errors_of([], []) is None


@given(st.lists(POSITIVE, min_size=1), st.floats(0, 1))
def test_quantiles_lie_between_neighbours(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert min(values) <= found <= max(values) * (1 + 1e-12)
    assert quantile(values, 0.0) == min(values)
    assert quantile(values, 1.0) == max(values)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_tau_is_what_its_definition_says(pairs: list[tuple[int, int]]) -> None:
    predicted, measured = [float(one) for one, _ in pairs], [float(other) for _, other in pairs]
    found = kendall_tau(predicted, measured)
    products = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    agree, disagree = sum(value > 0 for value in products), sum(value < 0 for value in products)
    untied = [sum(a[side] != b[side] for a, b in combinations(pairs, 2)) for side in (0, 1)]
    if found is None:
        assert 0 in untied
    else:
        assert found == pytest.approx((agree - disagree) / (untied[0] * untied[1]) ** 0.5)


@given(st.lists(POSITIVE, min_size=2, unique=True))
def test_tau_of_the_same_order_is_one(values: list[float]) -> None:
    assert kendall_tau(values, [value**3 for value in values]) == pytest.approx(1.0)
    assert kendall_tau(values, [-value for value in values]) == pytest.approx(-1.0)


def test_confusion() -> None:
    found = Confusion(fits=6, false_alarms=1, caught=2, missed=1)
    assert (found.count, found.accuracy, found.missed_share) == (10, 0.8, 0.1)
    assert (found + found).count == 20
