"""Attention that a model writes out, as its outline has it: one call."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint


def read_attention(module: nn.Module, blueprint: Blueprint, batch: Mapping[str, Tensor]) -> None:
    """Let a copy of a blueprint's module on the meta device be read as ranks that share its sequence read it, where it
    writes attention out."""
    if not blueprint.writes_attention:
        return
    from weft.model.attention.place_biases import AnyBias
    from weft.model.attention.written import AttentionReader  # loaded where a model does
    from weft.model.hf import drop_masks, square_buffers  # models of one's own may need nothing of transformers

    drop_masks(module, written=True)
    for name, value in square_buffers(blueprint.module).items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)
    tokens = batch["tokens"].shape[1]
    biases, causal = AnyBias() if blueprint.biased else None, blueprint.attention == "causal"
    AttentionReader(tokens, causal=causal, windows=blueprint.windows, refused=_unread, biases=biases).watch(module)


def _unread(name: str, what: str) -> PlanError:
    return PlanError(f"{name or 'its forward'} writes its attention out, and {what}")
