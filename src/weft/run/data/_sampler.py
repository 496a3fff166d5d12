"""Chooses the samples of a step, by a pure function of (seed, step) that knows nothing of ranks.

Positions 0, 1, 2, … form one infinite stream.  A blend says which corpus each position draws from, the n-th draw of a
corpus is entry n mod size of its epoch n div size, and a keyed permutation orders each epoch.  So the whole state of
the data is one cursor: the number of positions consumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import MicrobatchPlan
from weft.errors import DataError, PlanError
from weft.run.data._keyed import Permutation

_LONGEST_PERIOD = 65_536
"""Largest number of draws in a period, which is laid out in memory: two int64 of each, 1 MiB."""


class Blend:
    """Interleave corpora in fixed proportions with random access.

    One period is laid out once: the j-th draw of a corpus with c draws stands at (j + ½) / c of the period, and draws
    are taken in the order of these points.  Every period has exactly the given proportions, and no prefix strays from
    them by more than half of the number of corpora plus one half.

    Args:
        weights: One positive number per corpus.  They are exact when they are fractions with a common denominator of
            at most 65,536 (after normalising); else they are rounded to that denominator.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _period_counts(weights)
        self.period = int(self.counts.sum())
        corpus = np.repeat(np.arange(len(self.counts)), self.counts)
        # The draws of every corpus lie evenly over the period, so that no corpus comes in bursts.  A stable sort
        # settles draws at the same point by the order of the corpora, alike on every rank.
        nth = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((nth + 0.5) / self.counts[corpus], kind="stable")
        self._corpus, self._nth = corpus[order], nth[order]

    def draws(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each stream position, its corpus and how many draws that corpus made before it."""
        turns, place = np.divmod(positions, self.period)
        corpus = self._corpus[place]
        return corpus, turns * self.counts[corpus] + self._nth[place]


def _period_counts(weights: Sequence[float]) -> NDArray[np.int64]:
    for index, weight in enumerate(weights):
        if not math.isfinite(weight) or weight <= 0:
            raise DataError(
                f"data.train[{index}].weight = {weight}: a blend needs positive finite weights. "
                f"Give a number above 0, or leave the source out."
            )
    # By its decimal text 0.1 is one tenth; as a float it would have a denominator of 2**55, and no short period.
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions, Fraction(0))
    fractions = [fraction / total for fraction in fractions]
    period = math.lcm(*(fraction.denominator for fraction in fractions))
    if period <= _LONGEST_PERIOD:
        return np.array([int(fraction * period) for fraction in fractions], np.int64)
    exact = np.array([float(fraction) * _LONGEST_PERIOD for fraction in fractions])
    # Largest remainders: rounded down first, then the corpora that lost most get one draw more.  Each keeps one at
    # least.
    counts = np.maximum(np.floor(exact), 1).astype(np.int64)
    while (missing := _LONGEST_PERIOD - int(counts.sum())) > 0:
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


class Sampler:
    """The order of all samples of a run, the same under every world size.

    A *sample id* names one use of one sample: `epoch × total + base[corpus] + index`, so that the same sample has
    another id, and other dropout, in its next epoch.

    Args:
        sizes: Samples in each corpus.
        seed: The run's seed.
        global_batch_size: Samples per step.
        weights: Proportions of the corpora; None: by their sizes (each seen once per epoch for a single corpus).
    """

    def __init__(
        self, sizes: Sequence[int], *, seed: int, global_batch_size: int, weights: Sequence[float] | None = None
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise DataError(f"A corpus without samples cannot be sampled: sizes are {list(sizes)}. Give more data.")
        if global_batch_size < 1:
            raise DataError(f"batch.global_batch_size = {global_batch_size}: a step needs at least 1 sample.")
        self.sizes = tuple(int(size) for size in sizes)
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.blend = Blend([float(size) for size in sizes] if weights is None else weights)
        self._bases = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self._orders: dict[tuple[int, int], Permutation] = {}

    @property
    def size(self) -> int:
        """Samples in all corpora together."""
        return int(self._bases[-1])

    def order(self, epoch: int, corpus: int = 0) -> Permutation:
        """Return the order in which an epoch of a corpus is read."""
        key = (epoch, corpus)
        permutation = self._orders.get(key)  # threads that read ahead may ask, and clear, at the same time
        if permutation is None:
            # A permutation is a few keys, so old epochs are dropped, and made again by the rare step that needs one.
            if len(self._orders) > 4 * len(self.sizes):
                self._orders.clear()
            permutation = self._orders[key] = Permutation(self.sizes[corpus], self.seed, corpus, epoch)
        return permutation

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """Return the ids of the global batch of a step, int64 `(global_batch_size,)`; steps count from 0."""
        start = step * self.global_batch_size
        return self.ids_at(np.arange(start, start + self.global_batch_size, dtype=np.int64))

    def ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample ids at positions of the infinite stream."""
        corpora, draws = self.blend.draws(positions)
        ids = np.empty(len(positions), np.int64)
        # By corpus and epoch, because each has a permutation of its own; a batch that crosses the end of an epoch has
        # samples of two.
        for corpus in np.unique(corpora).tolist():
            mine = np.flatnonzero(corpora == corpus)
            epochs, places = np.divmod(draws[mine], self.sizes[corpus])
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                index = self.order(epoch, corpus)(places[here])
                # The epoch is part of the id, so that masks and augmentation of a sample differ from epoch to epoch.
                ids[mine[here]] = epoch * self.size + self._bases[corpus] + index
        return ids

    def locate(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (corpus, epoch, index within the corpus) of each sample id."""
        epochs, rest = np.divmod(ids, self.size)
        corpora = np.searchsorted(self._bases, rest, side="right").astype(np.int64) - 1
        return corpora, epochs, rest - self._bases[corpora]

    def state(self, step: int, fingerprint: str) -> dict[str, int | str]:
        """Return what a checkpoint keeps of the data before `step` runs: one cursor, and what it counts in."""
        size = self.global_batch_size
        # Samples and not steps: a cursor that says how many samples were used does not depend on the batch size.
        return {"cursor": step * size, "seed": self.seed, "fingerprint": fingerprint, "global_batch_size": size}

    def step_of(self, state: Mapping[str, object], fingerprint: str) -> int:
        """Return the step to continue with from a saved state.

        Raises:
            DataError: The state belongs to other data, another seed or another global batch, or stands within one.
        """
        if state.get("fingerprint") != fingerprint:
            raise DataError(
                f"The run was saved with data {state.get('fingerprint')}, but the recipe now gives data {fingerprint}: "
                f"the samples would not be the same. Use the recipe and the files of the saved run, or start a new run."
            )
        if state.get("seed") != self.seed:
            raise DataError(
                f"The run was saved with run.seed = {state.get('seed')}, but the recipe now says {self.seed}: samples "
                f"would be repeated and skipped. Set run.seed = {state.get('seed')}, or start a new run."
            )
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise DataError(f"The saved position in the data is {cursor!r}, not a number of samples. Start a new run.")
        size = state.get("global_batch_size", self.global_batch_size)
        if size != self.global_batch_size:
            raise DataError(
                f"The run was saved with batch.global_batch_size = {size}, but the recipe now says"
                f" {self.global_batch_size}: its steps and its schedule would not be the same. Set"
                f" batch.global_batch_size = {size}, or start a new run from the exported weights."
            )
        step, rest = divmod(cursor, self.global_batch_size)
        if rest:
            raise DataError(
                f"The saved run has seen {cursor} samples, which is not a whole number of batches of "
                f"{self.global_batch_size}. Use a batch.global_batch_size that divides {cursor}."
            )
        return step


def rank_range(microbatch: MicrobatchPlan, data_ranks: int, data_index: int) -> tuple[int, int]:
    """Return the part [start, stop) of every global batch that a data rank computes.

    Raises:
        PlanError: The plan has shares for another number of data ranks.
    """
    shares = microbatch.shares(data_ranks)
    if len(shares) != data_ranks:
        raise PlanError(
            f"plan.microbatch.per_step lists {len(shares)} shares, but replicate × shard = {data_ranks} data ranks. "
            f"Give {data_ranks} numbers, or one number for all."
        )
    assert 0 <= data_index < data_ranks, (data_index, data_ranks)
    return microbatch.size * sum(shares[:data_index]), microbatch.size * sum(shares[: data_index + 1])


def check_batch(microbatch: MicrobatchPlan, data_ranks: int, global_batch_size: int) -> None:
    """Refuse a plan whose microbatches do not add up to the global batch.

    Raises:
        PlanError: Gives both sizes.
    """
    count = sum(microbatch.shares(data_ranks))
    if microbatch.size * count == global_batch_size:
        return
    shares, rest = divmod(global_batch_size, microbatch.size * data_ranks)
    fix = f"Set per_step = {shares}" if shares and not rest else "Choose a size that divides the global batch"
    raise PlanError(
        f"The plan computes {microbatch.size * count} samples per step (plan.microbatch.size = {microbatch.size} × "
        f"{count} microbatches on {data_ranks} data ranks), but batch.global_batch_size = {global_batch_size}. {fix}."
    )
