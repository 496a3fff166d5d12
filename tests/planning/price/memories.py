"""The memory of one layout."""

from __future__ import annotations

from collections.abc import Sequence

from weft.model.profile import Profile
from weft.planning.price import Memories, StageMemory
from weft.techniques.cost_terms import WEFT, Framework, Layout


def memory_of(
    profile: Profile,
    layout: Layout,
    framework: Framework = WEFT,
    *,
    cuts: Sequence[int] | None = None,
    on_accelerator: bool = True,
) -> tuple[StageMemory, ...]:
    """The memory of every pipeline rank."""
    return Memories(profile, framework, on_accelerator=on_accelerator).of(layout, cuts)
