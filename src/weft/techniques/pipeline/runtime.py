"""A pipeline on a rank: the stages of the model that it holds, and what runs microbatches through them.

The orders of actions come from `schedules`; the runtime is Weft's own, not that of `torch.distributed.pipelining`.  As
read in 2.13, that one fixes the number and the shapes of microbatches with the first step, exchanges pickled metadata
unless every stage is described by hand, allocates the receive buffers of all microbatches at once, computes the weight
gradients of a split backward past the hooks of the parameters (see `weight_pass`), and a subclass of its stage would
have to lean on private parts that change between minors.  What Weft needs beside the orders is small: `routes` (which
messages, in which order), `transport` (sends and receives), `stage` (forward and backward of one microbatch),
`weight_pass` (the second half of a split backward) and `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.errors import PlanError
from weft.model.families import FoundCut
from weft.techniques.core import ModelPart, Runner
from weft.techniques.pipeline.cut import cut_table_of
from weft.techniques.pipeline.parts import cut_parts
from weft.techniques.pipeline.runner import PipelineRunner
from weft.techniques.pipeline.stages import stage_of
from weft.techniques.pipeline.ties import share_parameters
from weft.techniques.randomness.draws import LOSS, shown
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class PipelineRanks(TechniqueRuntime):
    """This rank's stages."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def parts(self) -> list[ModelPart]:
        _refuse_draws_between_stages(self._build)
        build = self._build
        return cut_parts(build.blueprint, build.plan, build.mesh, build.context, build.dtypes.compute)

    def tie_parts(self, parts: Sequence[ModelPart]) -> None:
        share_parameters(parts)

    def runner(self, parts: Sequence[ModelPart]) -> Runner:
        build = self._build
        return PipelineRunner(parts, build.blueprint, build.plan, build.mesh, dtype=build.dtypes.compute)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return PipelineRanks(build)


def _refuse_draws_between_stages(build: Build) -> None:
    table = cut_table_of(build.blueprint)
    if isinstance(table, FoundCut):
        return  # there every stage may compute the same once more, and draws have keys: all draw the same
    cuts = tuple(range(1, build.plan.num_stages))
    for name in build.draws.modules:
        if name != LOSS and stage_of(name, table, cuts) is None:
            raise PlanError(
                f"{shown(name, build.blueprint)} draws by {build.draws.operators(name)} outside the modules of its cut"
                f" table, so every stage would draw again. Move the draw into one of them, or use"
                " plan.mesh.pipeline = 1."
            )
