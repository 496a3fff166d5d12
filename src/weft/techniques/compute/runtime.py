"""Compilation on a rank: after everything else that changes the forward of a block."""

from __future__ import annotations

from typing import final

from weft.parallel import ModelPart
from weft.parallel.technique import Build, TechniqueRuntime
from weft.techniques.compute.compiling import apply_compile


@final
class CompiledBlocks(TechniqueRuntime):
    """Blocks that run as compiled code."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def wrap(self, part: ModelPart) -> None:
        apply_compile(part.module, self._build.blueprint, self._build.plan, self._build.context)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.parallel.technique`."""
    return CompiledBlocks(build)
