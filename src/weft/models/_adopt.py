"""Tables for a model that a user has already built."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.families import Tables


def tables_of(module: nn.Module, sequence_length: int | None = None) -> Tables:
    """Return the tables of a Hugging Face model by its family, else none: such a model gets data and ZeRO plans
    only."""
    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(config, "model_type") or not type(module).__module__.startswith("transformers."):
        return Tables()
    from weft.models.hf import tables_of_model

    return tables_of_model(module, sequence_length)
