"""Attention that a model writes out, as its outline has it: one call."""

from __future__ import annotations

from torch import nn

from weft.errors import PlanError
from weft.models import Blueprint
from weft.models.written import AttentionReader


def read_attention(module: nn.Module, blueprint: Blueprint, tokens: int) -> None:
    """Let a copy of a blueprint's module on the meta device be read as ranks that share its sequence read it."""
    from weft.models.hf import drop_masks, square_buffers  # models of one's own may need nothing of transformers

    drop_masks(module, written=True)
    for name, value in square_buffers(blueprint.module).items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)
    AttentionReader(tokens, causal=blueprint.attention == "causal", refused=_unread).watch(module)


def _unread(name: str, what: str) -> PlanError:
    return PlanError(f"{name or 'its forward'} writes its attention out, and {what}")
