"""What a training system keeps in memory by itself, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_MEBI = 2**20
_GIBI = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkMemory:
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
    """Whether norms run as one kernel; several keep fp32 copies.  None: as `Framework.fused_elementwise` says."""
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
    accumulates_unsharded: bool = False
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
    """Share of the allocated peak that the allocator reserves above it."""
    workspace_bytes: float = 64.0 * _MEBI
    """Workspace of kernels, inside the allocator."""
    context_bytes: float = 0.6 * _GIBI
    """Memory outside the allocator of the device's context and libraries."""
    communicator_bytes: float = 0.25 * _GIBI
    """Memory outside the allocator of each axis longer than 1."""
