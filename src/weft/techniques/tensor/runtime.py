"""Tensor and sequence parallelism on a rank: layers split over the tensor axis, and the borders of the sequence."""

from __future__ import annotations

from typing import final

from weft.techniques.core import ModelPart
from weft.techniques.runtime import Build, TechniqueRuntime
from weft.techniques.tensor.layers import apply_tensor
from weft.techniques.tensor.mesh_2d.shape import grid_of_plan
from weft.techniques.tensor.sequence import apply_sequence


@final
class TensorRanks(TechniqueRuntime):
    """This rank's share of every matrix."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def split(self, part: ModelPart) -> None:
        build = self._build
        shape = grid_of_plan(build.plan)
        if shape is not None:
            from weft.techniques.tensor.mesh_2d.layers import apply_grid  # loaded where ranks form a grid

            apply_grid(part, build, shape)
            return
        build.mesh.set_loss_replicas(None)
        apply_tensor(part.module, build.blueprint, build.plan, build.mesh, build.context, part.layout)
        if build.plan.tensor_parallel.sequence:
            apply_sequence(part.module, build.blueprint, build.plan, build.mesh, build.context, part.layout)
            part.shares_sequence = True


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return TensorRanks(build)
