"""The one description of a model, of which everything that a plan, a price or a check must know is a reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.config.plan import ModelFacts
from weft.model.families import Tables
from weft.model.profile import ModelSizes, Profile

_LOOKUP_COST = 0.05
"""Cost in blocks of a stem that multiplies nothing: looking up an embedding is nearly free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Operators of a model, the bytes that they keep, its split rules and its stage cuts."""

    profile: Profile
    tables: Tables = field(default_factory=Tables)
    sizes: ModelSizes | None = None
    """The numbers that make up the profile, of a transformer that is described by numbers."""
    notes: tuple[str, ...] = ()
    """Assumptions, and facts that could not be found: whole sentences without their end."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model that a plan depends on."""
        return self.profile.facts

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward of one sample, attention counted without the causal half."""
        return 3.0 * self.profile.flops_per_sample

    @property
    def block_costs(self) -> Sequence[float]:
        """Forward of [stem, block 0, …, tail] in units of the first block's, by which stages are balanced."""
        profile, length = self.profile, self.profile.sequence_length
        unit = profile.blocks[0].forward_flops(length)
        blocks = {id(block): block.forward_flops(length) / unit for block, _ in profile.count_blocks()}
        stem = profile.stem.forward_flops(length) / unit or _LOOKUP_COST
        return [stem, *(blocks[id(block)] for block in profile.blocks), profile.tail.forward_flops(length) / unit]
