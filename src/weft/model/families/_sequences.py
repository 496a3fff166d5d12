"""Whether ranks can share the sequence of a model of `transformers`, as far as its configuration tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.model.families._tables import OWN_CHECKPOINTS


def no_shared_sequence(config: Mapping[str, Any]) -> str:
    """See `Family.no_shared_sequence`."""
    if kind := _rescaled_rotation(config):
        return f'its rotary frequencies follow the largest position that a rank sees (rope type "{kind}")'
    names = config.get("architectures") or ()
    if names and not str(names[0]).endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return f"a {names[0]} predicts no token at each place"
    return OWN_CHECKPOINTS if config.get("gradient_checkpointing") else ""


def _rescaled_rotation(config: Mapping[str, Any]) -> str:
    """The kind of rotary embedding whose frequencies are computed from the positions at hand; empty: they are fixed."""
    for name in ("rope_parameters", "rope_scaling"):
        table = config.get(name)
        kind = (table.get("rope_type") or table.get("type")) if isinstance(table, Mapping) else None
        if kind in ("dynamic", "longrope", "su"):
            return str(kind)
    return ""
