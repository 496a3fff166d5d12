"""Find the storages that wait for backward: their size, the module that wants them, and whether a fused kernel would
keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.analysis.trace._events import Event, Save
from weft.analysis.trace._graph import Graph, WrittenAttention, is_pointwise


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStorage:
    """A storage kept by autograd, counted once however many operators want it."""

    storage: int
    size_bytes: int
    dtype: torch.dtype
    savers: tuple[Event, ...]
    """The main events of the calls that want it, in order."""
    producer: Event | None
    is_scores: bool
    """Whether it is as large as attention's scores, and follows from attention's sizes."""
    again: bool
    """Whether kernels that fuse element-wise operators compute it again instead."""

    @property
    def saver(self) -> Event | None:
        return self.savers[0] if self.savers else None


def kept_storages(graph: Graph, attentions: Sequence[WrittenAttention]) -> list[KeptStorage]:
    """Return what one traced batch keeps, parameters, buffers and what no sample adds to left out."""
    trace = graph.trace
    saves: dict[int, list[Save]] = {}
    for save in trace.saves:
        is_weight = save.storage in graph.derived and save.storage not in trace.per_sample
        if not is_weight and save.storage not in trace.buffers and save.storage in trace.per_sample:
            saves.setdefault(save.storage, []).append(save)
    inside = {index for attention in attentions for index in attention.inside}
    again = _Recomputable(graph, frozenset(saves))
    return [_kept(graph, storage, wanting, inside, again) for storage, wanting in saves.items()]


@dataclass(slots=True)
class _Recomputable:
    """Whether a storage can be computed from kept ones by element-wise operators alone."""

    graph: Graph
    saved: frozenset[int]

    def holds(self, storage: int, savers: Sequence[Event]) -> bool:
        producer = self.graph.producer.get(storage)
        if producer is None or not is_pointwise(producer) or not savers or not all(map(is_pointwise, savers)):
            return False
        return self._reaches(producer, 16)

    def _reaches(self, event: Event, steps: int) -> bool:
        inputs = [value.storage for value in event.inputs if value.storage in self.graph.trace.per_sample]
        for storage in inputs:
            producer = self.graph.producer.get(storage)
            if storage in self.saved:
                continue
            if steps == 0 or producer is None or not is_pointwise(producer) or not self._reaches(producer, steps - 1):
                return False
        return bool(inputs)


def _kept(graph: Graph, storage: int, saves: Sequence[Save], inside: set[int], again: _Recomputable) -> KeptStorage:
    mains = [graph.main(call) for call in dict.fromkeys(save.call for save in saves)]
    savers = tuple(event for event in mains if event is not None)
    producer = graph.producer.get(storage)
    return KeptStorage(
        storage=storage,
        size_bytes=graph.trace.storage_bytes[storage],
        dtype=graph.trace.storage_dtypes[storage],
        savers=savers,
        producer=producer,
        is_scores=producer is not None and producer.index in inside,
        again=again.holds(storage, savers),
    )
