"""The order of samples: bijective, in exact proportions, and ignorant of the world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.config.plan import MicrobatchPlan
from weft.errors import DataError, PlanError
from weft.run.data import Blend, Permutation, Sampler, rank_range
from weft.run.data._sampler import check_batch


@given(size=st.integers(1, 3000), key=st.integers(-(2**63), 2**63 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert np.array_equal(np.sort(order(np.arange(size))), np.arange(size))


def test_permutation_of_a_huge_range_needs_no_memory() -> None:
    size = 10**15 + 37
    positions = np.linspace(0, size - 1, 5000).astype(np.int64)
    permuted = Permutation(size, 1)(positions)
    assert len(np.unique(permuted)) == len(positions)
    assert permuted.min() >= 0
    assert permuted.max() < size
    # Uniform: the mean of 5,000 draws lies within five standard errors of the middle.
    assert abs(permuted.mean() / size - 0.5) < 5 * 12**-0.5 / 5000**0.5


def test_permutations_differ_by_epoch_and_seed_and_are_fixed_for_ever() -> None:
    sampler = Sampler([1000], seed=1, global_batch_size=4)
    first, second = (sampler.order(epoch)(np.arange(1000)) for epoch in (0, 1))
    assert (first == second).mean() < 0.02
    assert (first == np.arange(1000)).mean() < 0.02
    # A changed order would silently change every run; this pins it.
    assert Permutation(10, 1234, 0, 0)(np.arange(10)).tolist() == [0, 2, 7, 4, 8, 5, 9, 1, 3, 6]


def rank_share(ids: NDArray[np.int64], plan: MicrobatchPlan, ranks: int, index: int) -> list[NDArray[np.int64]]:
    """The microbatches of a data rank: slices of the ids of a global batch."""
    start, stop = rank_range(plan, ranks, index)
    check_batch(plan, ranks, len(ids))
    return [ids[at : at + plan.size] for at in range(start, stop, plan.size)]


@settings(max_examples=60)
@given(
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    step=st.integers(0, 200),
)
def test_shares_of_any_world_join_to_the_same_global_batch(
    shares: list[int], size: int, sizes: list[int], step: int
) -> None:
    batch = size * sum(shares)
    sampler = Sampler(sizes, seed=7, global_batch_size=batch, weights=[1.0] * len(sizes))
    ids = sampler.sample_ids(step)
    plan = MicrobatchPlan(size=size, per_step=tuple(shares))
    parts = [rank_share(ids, plan, len(shares), index) for index in range(len(shares))]
    assert [len(part) for part in parts] == shares
    assert np.array_equal(np.concatenate([one for part in parts for one in part]), ids)


@given(size=st.integers(1, 40), batch=st.integers(1, 60))
def test_every_epoch_has_every_sample_once_even_when_a_batch_spans_epochs(size: int, batch: int) -> None:
    sampler = Sampler([size], seed=3, global_batch_size=batch)
    steps = -(-4 * size // batch)
    ids = np.concatenate([sampler.sample_ids(step) for step in range(steps)])[: 4 * size]
    for epoch in range(4):
        used = ids[epoch * size : (epoch + 1) * size]
        assert np.array_equal(np.sort(used), np.arange(epoch * size, (epoch + 1) * size))


def test_batch_size_does_not_change_the_stream() -> None:
    small, large = (Sampler([30, 70], seed=5, global_batch_size=b, weights=[3, 1]) for b in (4, 12))
    few = np.concatenate([small.sample_ids(step) for step in range(30)])
    many = np.concatenate([large.sample_ids(step) for step in range(10)])
    assert np.array_equal(few, many)


@settings(max_examples=60)
@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=6), start=st.integers(0, 10**9))
def test_blend_keeps_exact_proportions_with_random_access(weights: list[int], start: int) -> None:
    blend = Blend([float(weight) for weight in weights])
    whole = np.array(weights) / sum(weights)
    corpora, draws = blend.draws(np.arange(blend.period, dtype=np.int64))
    assert np.array_equal(np.bincount(corpora), blend.counts)
    assert np.allclose(blend.counts / blend.period, whole, rtol=0, atol=1e-15)
    for corpus in range(len(weights)):
        assert np.array_equal(draws[corpora == corpus], np.arange(blend.counts[corpus]))
    # No prefix strays far from the proportions, and the far future is as exact as the start.
    seen = np.cumsum(corpora[:, None] == np.arange(len(weights)), axis=0)
    want = np.arange(1, blend.period + 1)[:, None] * whole
    assert np.abs(seen - want).max() <= (len(weights) + 1) / 2
    late, at = blend.draws(np.arange(start, start + 20, dtype=np.int64))
    again, turns = blend.draws(np.arange(start, start + 20, dtype=np.int64) % blend.period)
    assert np.array_equal(late, again)
    assert np.array_equal(at - turns, np.arange(start, start + 20) // blend.period * blend.counts[late])


def test_blend_of_awkward_weights_is_close() -> None:
    weights = [0.1, 1 / 3, 2**0.5]
    blend = Blend(weights)
    assert blend.period == 65_536
    assert np.allclose(blend.counts / blend.period, np.array(weights) / sum(weights), rtol=0, atol=1 / 65_536)


def test_locate_inverts_ids() -> None:
    sampler = Sampler([5, 11, 3], seed=1, global_batch_size=64, weights=[1, 1, 2])
    corpora, epochs, index = sampler.locate(sampler.sample_ids(3))
    bases = np.array([0, 5, 16])
    assert np.array_equal(epochs * 19 + bases[corpora] + index, sampler.sample_ids(3))
    assert (index < np.array([5, 11, 3])[corpora]).all()
    assert np.bincount(corpora).tolist() == [16, 16, 32]


def test_state_is_one_cursor() -> None:
    sampler = Sampler([100], seed=1, global_batch_size=8)
    state = sampler.state(12, "abc")
    assert state == {"cursor": 96, "seed": 1, "fingerprint": "abc", "global_batch_size": 8}
    assert sampler.step_of(state, "abc") == 12
    with pytest.raises(DataError, match=r"saved with batch.global_batch_size = 8, but the recipe now says 12"):
        Sampler([100], seed=1, global_batch_size=12).step_of(state, "abc")
    with pytest.raises(DataError, match="saved with data abc, but the recipe now gives data xyz"):
        sampler.step_of(state, "xyz")
    with pytest.raises(DataError, match=r"run\.seed = 1, but the recipe now says 2"):
        Sampler([100], seed=2, global_batch_size=8).step_of(state, "abc")
    with pytest.raises(DataError, match="position in the data is None"):
        sampler.step_of({"seed": 1, "fingerprint": "abc"}, "abc")
    with pytest.raises(DataError, match="not a whole number of batches of 8"):
        sampler.step_of({**state, "cursor": 97}, "abc")


def test_bad_plans_and_weights_are_refused() -> None:
    ids = np.arange(16)
    with pytest.raises(PlanError, match=r"12 samples per step .* batch\.global_batch_size = 16\. Set per_step = 4"):
        rank_share(ids, MicrobatchPlan(size=2, per_step=3), 2, 0)
    with pytest.raises(PlanError, match="lists 3 shares, but replicate × shard = 2"):
        rank_share(ids, MicrobatchPlan(size=2, per_step=(1, 2, 3)), 2, 0)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match=r"data.train\[1\].weight"):
            Blend([1.0, weight])
    with pytest.raises(DataError, match="corpus without samples"):
        Sampler([3, 0], seed=1, global_batch_size=1)
