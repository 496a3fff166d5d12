"""What a training system does by itself, whatever the layout: neither model nor device."""

from __future__ import annotations

from dataclasses import dataclass

from weft.techniques.cost_terms._framework_memory import FrameworkMemory

_MEMORY = FrameworkMemory(
    fused_norms=True, fused_activations=False, bucket_copies=0.0, accumulates_unsharded=True, holds_gathered=True
)
"""The memory of Weft besides the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A training framework.  One scalar is fitted per framework; the rest says what its code does."""

    name: str
    year: int
    slowdown: float = 1.0
    """Measured over predicted step time, fitted; 1 where no measurement was published."""
    spread: float = 0.15
    """Standard deviation of log(measured / predicted) left after the fit: the prior's where there was none."""
    flash_attention: bool = True
    """Whether attention never writes its scores to memory."""
    fused_parts: bool = True
    """The same of attention to the keys of ranks that share a sequence, where they come one after another."""
    attention_speed: float = 1.0
    """Speed of its fused attention over the best that was published for the device: FlashAttention's first release
    ran at about half the speed of the second (arXiv 2307.08691), the second on an H100 at about two thirds of the
    third."""
    fused_elementwise: bool = True
    """Whether norms, activations and dropouts run as one kernel each."""
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    """Whether gathers of ZeRO-3, and those of the distributed optimizer, overlap."""
    overlap_tensor: bool = False
    """Whether tensor-parallel collectives run beside the matrix products."""
    overlap_tensor_backward: bool = False
    """Whether, in backward, gradients of inputs are summed beside the products for the weights: Megatron since 2022."""
    bucket_elements: int = 0
    """Gradients that are reduced together at least, whatever the layout says."""
    bucket_elements_per_rank: int = 0
    """The same, per data rank: larger groups need larger messages."""
    overlap_expert: bool = False
    """Whether tokens travel to experts beside the computation of another microbatch."""
    sends_tokens_once: bool = False
    """Whether a token travels once to each node that has experts of it and is copied there (DeepEP, HybridEP)."""
    balances_experts: bool = False
    """Whether its runs send every expert as many tokens as any other, as benchmarks do."""
    overlap_pipeline: bool = True
    counts_causal_half: bool = True
    """Whether its attention kernel skips masked scores."""
    eager: bool = False
    """Whether Python issues every kernel on its own; otherwise graphs or compilation do."""
    host_seconds: float | None = None
    """Time in which its host issues one kernel; None: the calibration's.  Graph capture brings it near 0."""
    memory: FrameworkMemory = _MEMORY
    """The framework's memory besides the model."""


WEFT = Framework(name="weft", year=2026, fused_parts=False)
