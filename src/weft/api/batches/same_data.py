"""Whether the ranks have read the same data: a split by an unseeded permutation gives each of them another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import Subset

from weft.api.batches.batch_shape import add_to_digest
from weft.api.batches.drawn_reads import seeded
from weft.api.batches.stream import BatchStream
from weft.api.ranks.agreement import UNKNOWN

_SAMPLES, _READS = 8, 3


def facts_of_data(stream: BatchStream, seed: int) -> Mapping[str, str]:
    """Return what must be equal on all ranks of the data of a map-style loader: its subsets, and a few samples.

    Samples are read under seeded generators, which are put back.  Where a sample is another when it is read again (it
    draws from a generator of its own, or tells the time), nothing is said of any.
    """
    dataset: Any = stream.dataset
    if dataset is None:
        return {}
    facts = {
        f"data: the indices of the loader's Subset{number or ''}": _digest(np.asarray(indices))
        for number, indices in enumerate(_subsets(dataset))
    }
    return {**facts, f"data: {_SAMPLES} of the loader's samples": _samples(dataset, seed)}


def _subsets(dataset: Any) -> Iterator[Any]:
    while isinstance(dataset, Subset):
        yield list(dataset.indices)
        dataset = dataset.dataset


def _samples(dataset: Any, seed: int) -> str:
    """A digest of samples from the whole data set; `UNKNOWN` where they cannot be read again."""
    size = len(dataset)
    places = np.linspace(0, size - 1, min(_SAMPLES, size)).astype(np.int64).tolist() if size else []
    found: list[str] = []
    for place in places:
        try:
            read = {_read(dataset, place, seed) for _ in range(_READS)}
        except Exception:  # whatever a user's data raise: training reads them, and says so
            return UNKNOWN
        if len(read) > 1:
            return UNKNOWN
        found += read
    return _digest("".join(found))


def _read(dataset: Any, place: int, seed: int) -> str:
    with seeded(seed, place):
        return _digest(dataset[place])


def _digest(value: Any) -> str:
    digest = xxhash.xxh3_64()
    add_to_digest(digest, value)
    return digest.hexdigest()
