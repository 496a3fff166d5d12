"""What a training system keeps in memory by itself, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    parallel_logit_bytes: float | None = None
    """The same where the tensor axis shares out the vocabulary and the loss is computed in parts; None: as many."""
    gathered_logit_bytes: float | None = None
    """Where every rank of the tensor axis computes the loss of the whole vocabulary: held besides per element, for the
    shards that come from other ranks.  None: each rank does so for its own part."""
    fused_chunk_bytes: float = 256.0 * _MEBI
    """Bytes of the fp32 logits that exist at once when head and loss are computed together in chunks."""
    selective: Literal["operators", "alternate", "attention"] = "operators"
    """What `recompute = "selective"` keeps: the results of matmuls and attention; of every second matmul and of
    attention; or everything but the scores."""
    score_bytes: float = 2.0
    """Kept per score of attention that writes its scores: the probabilities, in compute precision; more where scaling,
    masking and softmax are separate kernels."""
    fused_norms: bool | None = None
    """Whether norms run as one kernel; several keep fp32 copies.  None: as `Stack.fused_elementwise` says."""
    fused_activations: bool | None = None
    """Whether gated activations run as one kernel, which keeps no activated gate.  None: the same."""
    masks_in_bytes: bool = True
    """Whether dropout keeps a byte per element; else it keeps factors in compute precision."""
    keeps_gathered: bool = False
    """Whether under sequence parallelism the gathered input of a column-parallel matmul waits for backward, instead of
    being gathered again."""
    kept_projection: Literal["none", "rotated", "all"] = "none"
    """What is kept of the joint projection of queries, keys and values beside what attention keeps: `rotated` where
    values stay views of it, so that turned queries and keys come on top; `all` where attention takes copies of all."""
    operands_in_fp8: bool = False
    """Whether matmuls in fp8 keep their inputs so."""
    gradient_copies: float = 0.0
    """Further gradients in compute precision beside those that are kept and reduced, as a share of the weights."""
    bucket_copies: float = 2.0
    """Buckets of gradients that exist beside the gradients themselves while they travel (ZeRO-2 and below)."""
    accumulates_whole: bool = False
    """ZeRO-2 and 3 in a pipeline: whether gradients of all microbatches are summed whole before one reduction, unless a
    layout says otherwise (`Layout.reduce_every`)."""
    holds_gathered: bool = False
    """ZeRO-3 in a pipeline, or with unequal shares: whether weights stay whole from a step's first forward to its last
    backward."""
    reduction_bytes: float = 0.0
    """Fixed buffers in which gradients travel, beside the layout's buckets."""
    gathered_blocks: float = 2.0
    """ZeRO-3: blocks whose whole weights are held at once, prefetched ones included."""
    gathers_ends: bool = True
    """ZeRO-3: whether embedding and head stay whole from forward to backward."""
    fragmentation: float = 0.04
    """What the allocator reserves above the allocated peak."""
    workspace_bytes: float = 64.0 * _MEBI
    """Workspace of kernels, inside the allocator."""
    context_bytes: float = 0.6 * _GIBI
    """Memory outside the allocator of the device's context and libraries."""
    communicator_bytes: float = 0.25 * _GIBI
    """Memory outside the allocator of each axis longer than 1."""


_MEGATRON = MemoryHabits(selective="attention", logit_bytes=8.0, kept_projection="rotated", operands_in_fp8=True)
"""Its loss over a vocabulary in parts: logits, an fp32 copy that turns into exponentials, the gradient (2 + 4 + 2)."""
_OLDER_MEGATRON = replace(_MEGATRON, logit_bytes=12.0)
"""Exponentials apart from the copy (2 + 4 + 4 + 2)."""
_DEEPSPEED = replace(
    _OLDER_MEGATRON,
    reduction_bytes=2e9,
    context_bytes=0.9 * _GIBI,
    communicator_bytes=0.3 * _GIBI,
)
"""Two buckets of 5 · 10⁸ elements (its default `reduce_bucket_size`) in 16 bits."""
_HAGEMANN = MemoryHabits(
    selective="attention",
    logit_bytes=16.0,
    gathered_logit_bytes=10.0,
    keeps_gathered=True,
    kept_projection="rotated",
    fused_norms=False,
    fused_activations=False,
    fragmentation=0.08,
    context_bytes=1.2 * _GIBI,
)
"""Hagemann et al. 2023 (arXiv 2311.05610).  Every rank of the tensor axis gathers the logits: 2 + 4 + 4 + 4 + 2, and up
to 10 for the gathering; allocators of the time fragmented more than those with expandable segments."""
_FSDP = MemoryHabits()
HABITS: Mapping[str, MemoryHabits] = MappingProxyType(
    {
        "weft": MemoryHabits(
            fused_norms=True, fused_activations=False, bucket_copies=0.0, accumulates_whole=True, holds_gathered=True
        ),
        "fsdp": _FSDP,
        # Its loss in parts (torch.distributed.tensor.parallel.loss) adds gradient and exponentials apart: 4 bytes more.
        # In a pipeline `reshard_after_forward` is off, and FSDP2 sums whole fp32 gradients until the last microbatch.
        "torchtitan": replace(
            _FSDP,
            selective="alternate",
            keeps_gathered=True,
            parallel_logit_bytes=18.0,
            accumulates_whole=True,
            holds_gathered=True,
        ),
        "fms-fsdp": _FSDP,
        # Its fused loss works on 16-bit logits in place.
        "llm-foundry": replace(_FSDP, logit_bytes=6.0),
        # `F.silu(gate) * up`; attention on views of the joint projection; logits, fp32 copy and its gradient.
        "nanotron": MemoryHabits(
            keeps_gathered=True,
            kept_projection="all",
            fused_norms=True,
            fused_activations=False,
            logit_bytes=8.0,
            selective="attention",
        ),
        "megatron-lm": _MEGATRON,
        "nemo": _OLDER_MEGATRON,
        "megatron-bridge": _MEGATRON,
        "mlperf": _MEGATRON,
        "megascale": _MEGATRON,
        "zero-bubble": replace(_OLDER_MEGATRON, kept_projection="none"),
        "megatron-deepspeed": _DEEPSPEED,
        "megatron-deepspeed-fp32": _DEEPSPEED,
        "gpt-neox": _DEEPSPEED,
        "deepspeed": _DEEPSPEED,
        "hagemann": _HAGEMANN,
        "hagemann-fused": replace(_HAGEMANN, fused_norms=True),
    }
)
"""Habits by name of the system.  Sources: their code, as of the years whose runs were published; figures of bytes per
logit from the runs themselves (docs/concepts/planner.md)."""
