"""Recomputation on a rank: around the forwards of a part's blocks."""

from __future__ import annotations

from typing import final

from weft.techniques.core import ModelPart
from weft.techniques.recompute.blocks import apply_recompute
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class RecomputedBlocks(TechniqueRuntime):
    """Blocks that run their forward once more."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def wrap(self, part: ModelPart) -> None:
        apply_recompute(part.module, self._build.blueprint, self._build.plan, self._build.context)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return RecomputedBlocks(build)
