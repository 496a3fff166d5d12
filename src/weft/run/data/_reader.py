"""Read the samples of a step, in any process: a plain description goes in, numpy arrays come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.model.families import SampleField
from weft.run.data._fields import IGNORED, Fields, check_finite
from weft.run.data._sampler import Sampler
from weft.run.data._samples import SampleSet, SampleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """All that decides the training samples of every step."""

    sets: tuple[SampleSpec, ...]
    weights: tuple[float, ...]
    seed: int
    global_batch_size: int


class TrainReader:
    """Samples [start, stop) of every global batch."""

    def __init__(self, spec: TrainSpec, start: int, stop: int) -> None:
        self._sets = [one.open() for one in spec.sets]
        self._start, self._stop = start, stop
        self.sampler = Sampler(
            [one.size for one in self._sets],
            weights=spec.weights,
            seed=spec.seed,
            global_batch_size=spec.global_batch_size,
        )
        self.fields = with_ids(self._sets[0].fields)

    def read(self, step: int) -> Fields:
        """Return the samples of a step, stacked along dim 0, with their `sample_ids`."""
        ids = self.sampler.sample_ids(step)[self._start : self._stop]
        corpora, _, index = self.sampler.locate(ids)
        return gather(self._sets, corpora, index, ids)


class ValidationReader:
    """The samples of all validation sets, one after the other, each exactly once."""

    def __init__(self, specs: Sequence[SampleSpec]) -> None:
        self._sets = [spec.open() for spec in specs]
        self._bases = np.concatenate([[0], np.cumsum([one.size for one in self._sets])]).astype(np.int64)
        self.fields = with_ids(self._sets[0].fields)

    @property
    def size(self) -> int:
        return int(self._bases[-1])

    def read(self, start: int, stop: int) -> Fields:
        """Return samples [start, stop); those past the end are there, but nothing of them counts in a loss."""
        ids = np.arange(start, stop, dtype=np.int64)
        real = ids[ids < self.size]
        corpora = np.searchsorted(self._bases, real, side="right").astype(np.int64) - 1
        samples = gather(self._sets, corpora, real - self._bases[corpora], real, self.fields)
        # The last batch is filled up to its full shape with samples that no loss counts: all ranks run as many
        # microbatches, of the same shape, and pipelines and collectives need no other case.
        batch = {name: self._ignored(name, field, len(ids)) for name, field in self.fields.items()}
        for name, values in samples.items():
            batch[name][: len(real)] = values
        batch["sample_ids"] = ids
        return batch

    def _ignored(self, name: str, field: SampleField, count: int) -> NDArray[Any]:
        value = IGNORED if name == "labels" and field.dtype == "int64" else 0
        return np.full((count, *field.shape), value, field.dtype)


def with_ids(fields: Mapping[str, SampleField]) -> dict[str, SampleField]:
    return {**fields, "sample_ids": SampleField((), "int64")}


def gather(
    sets: Sequence[SampleSet],
    corpora: NDArray[np.int64],
    index: NDArray[np.int64],
    ids: NDArray[np.int64],
    fields: Mapping[str, SampleField] | None = None,
) -> Fields:
    """Read each sample from its set and put it at its place in the batch."""
    fields = with_ids(sets[0].fields) if fields is None else fields
    batch: Fields = {name: np.empty((len(ids), *field.shape), field.dtype) for name, field in fields.items()}
    # One read for each corpus, of all of its rows at once; they are put where the blend placed them.
    for corpus in np.unique(corpora).tolist():
        rows = np.flatnonzero(corpora == corpus)
        for name, values in sets[corpus].read(index[rows], ids[rows]).items():
            batch[name][rows] = values
    batch["sample_ids"] = ids
    # Looked for here and not in the loss: the sample is still known by its id.
    for name, values in batch.items():
        if values.dtype.kind == "f":
            check_finite(name, values, ids)
    return batch
