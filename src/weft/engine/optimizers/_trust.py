"""What LAMB and LARS share: norms of whole parameters, and which parameters they adapt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from weft.comm import Mesh
from weft.engine.optimizers._base import whole_names
from weft.engine.optimizers._groups import OptimizerGroup
from weft.engine.optimizers._sums import ParameterSums, squared_sum
from weft.parallel import Segment, Shard


class LayerNorms:
    """Norms of the parameters of this rank's segments.  Constructing and calling it is collective."""

    def __init__(
        self, shards: Sequence[Shard], groups: Sequence[OptimizerGroup], mesh: Mesh, *, adapt_one_dimensional: bool
    ) -> None:
        self._sums = ParameterSums(shards, whole_names(groups), mesh)
        self._shards = shards
        self._device = mesh.device
        self._adapt_one_dimensional = adapt_one_dimensional

    def is_adapted(self, segment: Segment) -> bool:
        """Whether the parameter has a step size of its own; biases and norms take the plain step."""
        return self._adapt_one_dimensional or len(segment.layout.shape) >= 2

    def __call__(self, *flats: Sequence[Tensor]) -> Tensor:
        """Return norms, fp64 (kinds, segments), of flat tensors given shard by shard."""
        rows = [[squared_sum(run).to(self._device) for run in self._segments(flat)] for flat in flats]
        empty = torch.zeros(len(flats), 0, dtype=torch.float64, device=self._device)
        sums = torch.stack([torch.stack(row) for row in rows]) if rows[0] else empty
        return self._sums.total(sums).sqrt()

    def _segments(self, flat: Sequence[Tensor]) -> Iterator[Tensor]:
        for shard, tensor in zip(self._shards, flat, strict=True):
            for segment in shard.segments:
                yield tensor[segment.offset : segment.offset + segment.length]
