"""Compression on a rank: from what a plan says of it to the codecs that do it."""

from __future__ import annotations

import logging
from typing import final

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.techniques.compression.wire import CodecSpec, spec_of
from weft.techniques.runtime import Build, TechniqueRuntime

logger = logging.getLogger(__name__)


@final
class CompressedGradients(TechniqueRuntime):
    """What gradients are compressed by."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def codec(self) -> CodecSpec:
        build = self._build
        return compression_of(build.plan, build.seed, build.mesh, build.momentum_decay)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return CompressedGradients(build)


def compression_of(plan: Plan, seed: int, mesh: Mesh, momentum_decay: float | None) -> CodecSpec:
    """Return what the plan says of compression; random draws follow `seed`.

    Of one that promises nothing about convergence the first rank warns, once per training.  Call on every rank.

    Raises:
        PlanError: 1-bit Adam with an optimizer that is not Weft's AdamW.
    """
    data = plan.data_parallel
    if data.is_unproven and mesh.rank == 0:
        logger.warning(
            'plan.data_parallel.compression = "%s": nothing guarantees that this training converges as without it,'
            " because a step applies little of its gradients and owes the rest to later ones. Compare the losses of"
            ' a short run with compression = "none" first, or use "int8", which sends every gradient.',
            data.compression,
        )
    if data.frozen_after is not None and momentum_decay is None:
        raise PlanError(
            'plan.data_parallel.compression = "onebit" freezes the variance of AdamW, which your own optimizer does'
            ' not allow. Use "int8", or `weft train` with optimizer.name = "adamw".'
        )
    return spec_of(data, seed, momentum_decay)
