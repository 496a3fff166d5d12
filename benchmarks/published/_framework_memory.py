"""What training systems keep in memory by themselves, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from weft.techniques.cost_terms import WEFT, FrameworkMemory

_GIBI = 2**30

_MEGATRON = FrameworkMemory(selective="attention", logit_bytes=8.0, kept_projection="rotated", operands_in_fp8=True)
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
_HAGEMANN = FrameworkMemory(
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
_FSDP = FrameworkMemory()
MEMORY_OF_FRAMEWORKS: Mapping[str, FrameworkMemory] = MappingProxyType(
    {
        "weft": WEFT.memory,
        "fsdp": _FSDP,
        # Its loss in parts (torch.distributed.tensor.parallel.loss) adds gradient and exponentials apart: 4 bytes more.
        # In a pipeline `reshard_after_forward` is off, and FSDP2 sums whole fp32 gradients until the last microbatch.
        "torchtitan": replace(
            _FSDP,
            selective="alternate",
            keeps_gathered=True,
            parallel_logit_bytes=18.0,
            accumulates_unsharded=True,
            holds_gathered=True,
        ),
        "fms-fsdp": _FSDP,
        # Its fused loss works on 16-bit logits in place.
        "llm-foundry": replace(_FSDP, logit_bytes=6.0),
        # `F.silu(gate) * up`; attention on views of the joint projection; logits, fp32 copy and its gradient.
        "nanotron": FrameworkMemory(
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
