"""Compilation on a rank: after everything else that changes the forward of a block."""

from __future__ import annotations

from typing import final

from weft.techniques.compute.compiling import apply_compile
from weft.techniques.core import ModelPart
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class CompiledBlocks(TechniqueRuntime):
    """Blocks that run as compiled code."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def wrap(self, part: ModelPart) -> None:
        apply_compile(part.module, self._build.blueprint, self._build.plan, self._build.context)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return CompiledBlocks(build)
