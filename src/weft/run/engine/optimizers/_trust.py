"""Shared by LAMB and LARS: norms of whole parameters, and the choice of parameters that they adapt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.recipe import OptimizerGroup
from weft.run.engine.optimizers._base import whole_names
from weft.run.engine.optimizers._sums import ParameterSums, squared_sum
from weft.techniques.core import Segment, Shard


class LayerNorms:
    """Norms of the parameters of this rank's segments.  Constructing and calling it is collective."""

    def __init__(
        self, shards: Sequence[Shard], groups: Sequence[OptimizerGroup], mesh: Mesh, *, adapt_one_dimensional: bool
    ) -> None:
        self._sums = ParameterSums(shards, whole_names(groups), mesh)
        self._shards = shards
        # Slots are numbered by segment over all shards, also those that are not resident: every rank sums the same
        # slots.
        self._num_segments = sum(len(shard.segments) for shard in shards)
        self._device = mesh.device
        self._adapt_one_dimensional = adapt_one_dimensional

    def is_adapted(self, segment: Segment) -> bool:
        """Whether the parameter has a step size of its own; biases and norms take the plain step."""
        return self._adapt_one_dimensional or len(segment.layout.shape) >= 2

    def squares(self, kinds: int) -> Tensor:
        """Return zeros, fp64 (kinds, segments), for `add` to fill."""
        return torch.zeros(kinds, self._num_segments, dtype=torch.float64, device=self._device)

    def add(self, squares: Tensor, here: Collection[int], *flats: Sequence[Tensor]) -> None:
        """Fill in the squares of the shards that are `here`, of flat tensors given shard by shard."""
        position = 0
        for index, shard in enumerate(self._shards):
            for segment in shard.segments:
                if index in here:
                    run = slice(segment.offset, segment.offset + segment.length)
                    for kind, flat in enumerate(flats):
                        squares[kind, position] = squared_sum(flat[index][run])
                position += 1

    def total(self, squares: Tensor) -> Tensor:
        """Return the norms of whole parameters, fp64 (kinds, segments).  Call on every rank."""
        return self._sums.total(squares).sqrt()
