"""The memory of one pipeline rank by kind, of one layout or of a table of them (`weft.vectorized`)."""

from __future__ import annotations

from typing import NamedTuple

from weft.planning.price._prediction import MemoryKinds
from weft.techniques.cost_terms import Framework, Layout
from weft.techniques.zero.cost import States, gathers_weights, holds_weights, holds_whole_gradients, states_of
from weft.vectorized import Column, chosen

PROCESS_BYTES = 295e6
"""Bytes that a rank on a CPU holds beside its tensors: the interpreter, torch, the network, the allocator's remains.
Peaks of `weft train` less the tensors of three small models on 1, 2 and 4 ranks: 293 to 303 MB (2026-11, torch 2.13).
"""


class RankShare(NamedTuple):
    """Weights and activations of one rank."""

    dense: Column
    """Elements of weights that are no experts, the copy of a tied one included."""
    experts: Column
    waiting: Column
    """Bytes of activations between their forward and their backward."""
    live: Column
    """Bytes besides, during the backward of a block."""
    logits: Column
    """Bytes around the loss; 0 on ranks without the head."""
    widest: Column
    """Elements of the largest block's weights, experts included."""


class RankMemory(NamedTuple):
    """Factors that all pipeline ranks of a layout share; they turn a rank's weights and activations into bytes."""

    dense: States
    experts: States
    gradient_copies: float
    """Bytes per element."""
    gathered: Column
    """ZeRO-3: bytes per element of the widest block."""
    held: Column
    """ZeRO-3: bytes per element of all weights of the rank."""
    buffers: Column
    """Bytes in which gradients travel, or of the ends that ZeRO-3 keeps whole."""
    workspace: float
    reserved: float
    """Times the allocated bytes."""
    outside: Column
    """Bytes outside the allocator."""

    @classmethod
    def of(cls, layout: Layout, framework: Framework, *, ends: float, on_accelerator: bool) -> RankMemory:
        """`ends`: elements of stem and tail."""
        memory_model, element = framework.memory, layout.element_bytes
        gathers, holds = gathers_weights(layout), holds_weights(layout, framework)
        whole = holds_whole_gradients(layout, framework)
        # Gradients of a block are made in compute precision, and cast where they are kept in a wider one.
        wide = layout.gradient_bytes if layout.gradient_bytes > element else 0
        gathered = chosen(holds, 0.0, memory_model.gathered_blocks * element)
        gathered = gathered + chosen(whole | layout.adapters_only, 0, element + wide)
        axes = (layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert)
        communicators = sum(size > 1 for size in axes) * memory_model.communicator_bytes
        kept_ends = chosen(holds, 0.0, ends * element * memory_model.gathers_ends)
        return cls(
            dense=states_of(layout, whole_gradients=whole),
            experts=states_of(layout, experts=True, whole_gradients=whole),
            gradient_copies=memory_model.gradient_copies * element * layout.trained_share * (not layout.shards_weights),
            gathered=chosen(gathers, gathered, 0.0),
            held=chosen(holds, float(element), 0.0),
            buffers=chosen(gathers, kept_ends, _bucket_bytes(layout, framework)),
            workspace=memory_model.workspace_bytes if on_accelerator else 0.0,
            reserved=1 + memory_model.fragmentation if on_accelerator else 1.0,
            outside=memory_model.context_bytes + communicators if on_accelerator else PROCESS_BYTES,
        )

    def kinds(self, rank: RankShare) -> MemoryKinds:
        """Return what a rank has allocated at its fullest moment."""
        weights = rank.dense + rank.experts
        # The loss is over before the last block's backward begins: the larger of both counts.
        is_late = rank.live > rank.logits
        return MemoryKinds(
            rank.dense * self.dense.weights + rank.experts * self.experts.weights,
            rank.dense * self.dense.gradients + rank.experts * self.experts.gradients + self.gradient_copies * weights,
            rank.dense * self.dense.optimizer + rank.experts * self.experts.optimizer,
            rank.waiting + chosen(is_late, rank.live, 0.0),
            chosen(is_late, 0.0, rank.logits),
            self.buffers + (self.gathered * rank.widest + self.held * weights),
            self.workspace,
        )

    def device_bytes(self, rank: RankShare) -> Column:
        """Return all that a rank takes of its device."""
        return self.kinds(rank).allocated * self.reserved + self.outside


def _bucket_bytes(layout: Layout, framework: Framework) -> Column:
    """Bytes in which gradients travel."""
    if layout.adapters_only:
        return 0.0
    travels = layout.data * layout.context > 1
    return (
        chosen(travels, framework.memory.bucket_copies * layout.bucket_limits[1], 0.0)
        + framework.memory.reduction_bytes
    )
