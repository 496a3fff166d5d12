"""Tables for a model that a user has already built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from weft.model.families import Tables


def tables_of(module: nn.Module, sequence_length: int | None = None) -> Tables:
    """Return the tables of a Hugging Face model by its family, else none: such a model gets data and ZeRO plans
    only."""
    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(config, "model_type") or not type(module).__module__.startswith("transformers."):
        return Tables()
    from weft.model.hf import tables_of_model

    return _fitted(tables_of_model(module, sequence_length), module)


def _fitted(tables: Tables, module: nn.Module) -> Tables:
    """Return the family's tables as far as they hold for a model with another head. Where they miss a module, or name
    one that is not there, the model's forward is looked at for stages."""
    names = {name for name, _ in module.named_modules()}
    cut = tables.cut
    if cut is not None:
        known = (*cut.stem, *cut.blocks, *cut.tail, *cut.between)
        inside = tuple(f"{name}." for name in known)
        whole = all(name.startswith(inside) for name, _ in module.named_parameters())
        cut = cut if whole and names.issuperset(known) else None
    head = tables.vocabulary_head
    return replace(tables, cut=cut, vocabulary_head=head if head in names else None)
