"""What a training system keeps in memory by itself, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

_MEBI = 2**20
_GIBI = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHabits:
    """Figures that follow from a system's code, and few that were measured."""

    logit_bytes: float = 14.0
    """Held at once per element of the logits, around the loss.  14: logits and an fp32 copy (2 + 4) or, in backward,
    logits, log-probabilities and two gradients of fp32 (2 + 4 + 4 + 4), as PyTorch's cross-entropy of 16-bit logits
    does."""
    fused_share: float = 0.125
    """Of the logits that exist at once when head and loss are computed together in chunks."""
    selective: Literal["operators", "alternate", "attention"] = "operators"
    """What `recompute = "selective"` keeps: the results of matmuls and attention; of every second matmul and of
    attention; or everything but the scores."""
    score_bytes: float = 2.0
    """Kept per score of attention that writes its scores: the probabilities, in compute precision; more where scaling,
    masking and softmax are separate kernels."""
    norm_in_fp32: bool = False
    """Whether norms run as several kernels that keep fp32 copies."""
    keeps_gathered: bool = False
    """Whether under sequence parallelism the gathered input of a column-parallel matmul waits for backward, instead of
    being gathered again."""
    keeps_qkv: bool = False
    """Whether values stay views of the joint projection, so that rotated queries and keys come on top of it."""
    gradient_copies: float = 0.0
    """Further gradients in compute precision beside those that are kept and reduced, as a share of the weights."""
    update_bytes: float = 0.0
    """Temporaries of the optimizer's step, per element that this rank updates."""
    gathered_blocks: float = 2.0
    """ZeRO-3: blocks whose whole weights are held at once, prefetched ones included."""
    gathers_ends: bool = True
    """ZeRO-3: whether embedding and head stay whole from forward to backward."""
    fragmentation: float = 0.04
    """What the allocator reserves above the allocated peak."""
    workspace_bytes: float = 64.0 * _MEBI
    """Of kernels, inside the allocator."""
    context_bytes: float = 0.6 * _GIBI
    """Outside the allocator: the device's context and libraries."""
    communicator_bytes: float = 0.25 * _GIBI
    """Outside the allocator, of each axis longer than 1."""


HABITS: Mapping[str, MemoryHabits] = MappingProxyType(
    {
        "weft": MemoryHabits(),
        "torchtitan": MemoryHabits(selective="alternate", keeps_gathered=True),
        "nanotron": MemoryHabits(keeps_gathered=True),
        "megatron-lm": MemoryHabits(selective="attention", logit_bytes=10.0),
    }
)
"""By name of the system.  Sources: their code, as of the years whose runs were published."""
