"""The one description of a model, of which everything that a plan, a price or a check must know is a reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.config.plan import ModelFacts
from weft.model.families import (
    DROPPED_ATTENTION,
    NO_SEQUENCE,
    ROUTED_FEATURES,
    UNKNOWN_FEATURES,
    WINDOWED_ATTENTION,
    Tables,
)
from weft.model.profile import ModelSizes, Profile

_LOOKUP_COST = 0.05
"""Cost in blocks of a stem that multiplies nothing: looking up an embedding is nearly free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Operators of a model, the bytes that they keep, its split rules and its stage cuts."""

    profile: Profile
    tables: Tables = field(default_factory=Tables)
    sequence_length: int | None = None
    """Tokens per sample; None where samples are no sequences."""
    vocabulary_size: int | None = None
    """None: it reads no tokens."""
    sizes: ModelSizes | None = None
    """The numbers that make up the profile, of a transformer that is described by numbers."""
    num_experts: int = 0
    """Experts of every mixture that ranks can share out; 0: there are none."""
    no_experts: str = ""
    """Why ranks cannot share out those that it has, where the reason is known: a sentence without its end."""
    notes: tuple[str, ...] = ()
    """Assumptions, and facts that could not be found: whole sentences without their end."""

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model that a plan depends on."""
        profile, tables = self.profile, self.tables
        return ModelFacts(
            name=profile.name,
            num_blocks=len(profile.blocks) if profile.can_be_cut or self.sizes is not None else None,
            no_stages=tables.no_stages,
            no_pipeline=profile.no_pipeline,
            no_sequence="" if profile.can_share_sequence else NO_SEQUENCE,
            no_context="" if self.sequence_length is None else profile.no_context,
            no_grid=self._no_grid,
            no_cube=self._no_cube,
            no_tensor=tables.no_tensor,
            num_experts=self.num_experts,
            no_experts=self.no_experts,
            attention_heads=profile.attention_heads,
            divisible=dict(profile.divisible) or (None if tables.splits else {}),
            num_parameters=profile.num_parameters,
            hidden_size=profile.hidden_size,
            vocabulary_size=self.vocabulary_size,
            sequence_length=self.sequence_length,
            tied=profile.tied,
            has_batch_norm=profile.has_batch_norm,
            per_sample_loss=profile.per_sample_loss,
            no_gathering=profile.no_gathering,
        )

    @property
    def _no_grid(self) -> str:
        """Why tensor ranks form no grid; see `ModelFacts.no_grid`."""
        if self.sizes is None:
            return UNKNOWN_FEATURES
        return ROUTED_FEATURES if self.profile.num_experts else self.profile.no_shared_sequence

    @property
    def _no_cube(self) -> str:
        """Why they form no cube where they form other grids."""
        if self._no_grid:
            return ""
        if self.profile.attends_alone:
            return WINDOWED_ATTENTION
        return DROPPED_ATTENTION if self.profile.drops_attention else self.profile.no_context

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
