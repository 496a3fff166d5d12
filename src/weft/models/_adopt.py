"""Tables for a model that a user has already built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from weft.models._blueprint import CutTable, Localise, SplitRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """How a live model splits and cuts; empty where nothing is known of it."""

    split: Sequence[SplitRule] = ()
    localise: Sequence[Localise] = ()
    divisible: Mapping[str, int] = field(default_factory=dict[str, int])
    cut: CutTable | None = None
    vocabulary_head: str | None = None
    notes: Sequence[str] = ()


def tables_of(module: nn.Module, sequence_length: int | None = None) -> Tables:
    """Return the tables of a Hugging Face model by its family, else none: such a model gets data and ZeRO plans
    only."""
    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(config, "model_type") or not type(module).__module__.startswith("transformers."):
        return Tables()
    from weft.models.hf._families import family_of

    length = sequence_length or getattr(config, "max_position_embeddings", None) or 1
    family = family_of(config, module, length)
    return Tables(
        split=family.split,
        localise=family.localise,
        divisible=family.divisible,
        cut=family.cut,
        vocabulary_head=family.vocabulary_head,
        notes=family.notes,
    )
