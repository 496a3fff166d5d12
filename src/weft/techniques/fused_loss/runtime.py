"""The fused vocabulary loss on a rank: in place of the head's forward, where this rank's part has the head."""

from __future__ import annotations

from typing import final

from weft.techniques.core import ModelPart
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class FusedHead(TechniqueRuntime):
    """A head whose logits come in chunks."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def wrap(self, part: ModelPart) -> None:
        build = self._build
        if build.blueprint.vocabulary_head is None:
            return
        from weft.techniques.fused_loss.vocabulary import apply_fused_loss  # most ranks do without

        apply_fused_loss(part.module, build.blueprint, build.plan, build.mesh, part.layout, build.context, part.grid)


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return FusedHead(build)
