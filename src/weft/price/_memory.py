"""How much memory every pipeline rank needs, by kind, at the fullest moment of a step.

Sources: model states after Rajbhandari et al. 2020 (arXiv 1910.02054); activations after Korthikanti et al. 2022 (arXiv
2205.05198); microbatches in flight from the schedules themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Recompute, stage_ranks
from weft.price._block_memory import BlockMemories, BlockMemory, MemoryKey, activation_bytes, memory_key
from weft.price._in_flight import in_flight
from weft.price._layout import Layout
from weft.price._prediction import MemoryKinds, StageMemory
from weft.price._stack import WEFT, Stack
from weft.profile import Profile

_PROCESS_BYTES = 330e6
"""A rank on a CPU, before the first tensor: the interpreter, torch, the network."""


class StageSizes(NamedTuple):
    """One stage of one rank: elements of weights, and bytes of one microbatch."""

    dense: float
    experts: float
    kept: float
    live: float
    widest: float
    """Elements of the largest block's weights, experts included."""


class States(NamedTuple):
    """Bytes per element of the weights that a rank would hold without ZeRO."""

    weights: float
    gradients: float
    optimizer: float


def states_of(layout: Layout, *, experts: bool = False) -> States:
    """Return bytes of model states per element.  ZeRO-1 and 2 shard over data × context, ZeRO-3 over shard × context;
    experts, which the expert axis has shared out already, over as many ranks less."""
    element = activation_bytes(layout.precision)
    if layout.adapters_only:
        return States(element / (layout.shard * layout.context if layout.zero == 3 else 1), 0.0, 0.0)
    shards = (layout.shard if layout.zero == 3 else layout.data) * layout.context
    if experts:
        shards = max(1, shards // layout.expert)
    optimizer = 0.0 if layout.offload == "optimizer" else float(layout.master_bytes)
    return States(
        element / (shards if layout.zero == 3 else 1),
        layout.gradient_bytes / (shards if layout.zero >= 2 else 1),
        optimizer / (shards if layout.zero >= 1 else 1),
    )


class Memories:
    """Memory of layouts of one model under one stack; keeps every part that several layouts share."""

    def __init__(self, profile: Profile, stack: Stack = WEFT, *, on_accelerator: bool = True) -> None:
        self.profile, self.stack, self.on_accelerator = profile, stack, on_accelerator
        self.blocks = BlockMemories(profile, stack)
        self._tables: dict[tuple[MemoryKey, Recompute | tuple[Recompute, ...]], _Tables] = {}

    def of(self, layout: Layout, cuts: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
        """Return the memory of every pipeline rank.  `cuts` stand in for the layout's where it leaves them open; where
        both do, blocks are shared out evenly."""
        stages = self._stages(layout, cuts)
        return tuple(self._rank(layout, rank, held) for rank, held in enumerate(self._ranks(layout, stages)))

    def fullest(self, layout: Layout, cuts: Sequence[int] | None = None) -> float:
        """Return the device bytes of the fullest pipeline rank."""
        return max(stage.device for stage in self.of(layout, cuts))

    def _stages(self, layout: Layout, cuts: Sequence[int] | None) -> tuple[StageSizes, ...]:
        key = (memory_key(layout), layout.recompute)
        if key not in self._tables:
            words = layout.recompute
            each = (words,) * len(self.profile.blocks) if isinstance(words, str) else words
            self._tables[key] = _Tables(
                [
                    self.blocks.memory(self.profile.stem, key[0]),
                    *(
                        self.blocks.memory(one, key[0], word)
                        for one, word in zip(self.profile.blocks, each, strict=True)
                    ),
                    self.blocks.memory(self.profile.tail, key[0]),
                ]
            )
        chosen = layout.cuts if layout.cuts is not None else cuts
        return self._tables[key].stages(tuple(chosen) if chosen is not None else None, layout.num_stages)

    def _ranks(self, layout: Layout, stages: Sequence[StageSizes]) -> list[list[StageSizes]]:
        ranks = stage_ranks(layout.schedule, layout.pipeline, layout.chunks) if len(stages) > 1 else (0,)
        held: list[list[StageSizes]] = [[] for _ in range(layout.pipeline)]
        for rank, stage in zip(ranks, stages, strict=True):
            held[rank].append(stage)
        return held

    def _rank(self, layout: Layout, rank: int, held: Sequence[StageSizes]) -> StageMemory:
        kinds = self._kinds(layout, rank, held)
        habits, allocated = self.stack.memory, kinds.allocated
        if not self.on_accelerator:
            return StageMemory(rank=rank, kinds=kinds, reserved=allocated, device=allocated + _PROCESS_BYTES)
        axes = (layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert)
        groups = sum(size > 1 for size in axes)
        reserved = allocated * (1 + habits.fragmentation)
        outside = habits.context_bytes + groups * habits.communicator_bytes
        return StageMemory(rank=rank, kinds=kinds, reserved=reserved, device=reserved + outside)

    def _kinds(self, layout: Layout, rank: int, held: Sequence[StageSizes]) -> MemoryKinds:
        habits = self.stack.memory
        dense, experts = sum(stage.dense for stage in held), sum(stage.experts for stage in held)
        plain, routed = states_of(layout), states_of(layout, experts=True)
        extra = 0.0
        if self.profile.tied and layout.pipeline > 1 and self._is_last(layout, rank):
            extra = self.profile.vocabulary_size * self.profile.hidden_size / layout.tensor
        dense += extra
        element = activation_bytes(layout.precision)
        waiting = self._waiting(layout, rank, held)
        logits = self.logits(layout) if self._is_last(layout, rank) else 0.0
        live = max(stage.live for stage in held)
        gradients = dense * plain.gradients + experts * routed.gradients
        if not layout.adapters_only and layout.zero < 3:
            gradients += habits.gradient_copies * element * (dense + experts)
        return MemoryKinds(
            weights=dense * plain.weights + experts * routed.weights,
            gradients=gradients,
            optimizer=dense * plain.optimizer + experts * routed.optimizer,
            # The loss is over before the last block's backward begins: the larger of both counts.
            activations=waiting + (live if live > logits else 0.0),
            logits=logits if logits >= live else 0.0,
            buckets=self._gathered(layout, held),
            workspace=habits.workspace_bytes if self.on_accelerator else 0.0,
        )

    def _is_last(self, layout: Layout, rank: int) -> bool:
        if layout.pipeline > 1 and layout.schedule in ("zbv", "dualpipev"):
            return rank == 0
        return rank == layout.pipeline - 1

    def _waiting(self, layout: Layout, rank: int, held: Sequence[StageSizes]) -> float:
        """Activations between their forward and their backward."""
        counts = in_flight(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches, rank)
        if layout.offload == "activations":
            # One microbatch's chunk is being written or read while another computes.
            return 2 * max(stage.kept for stage in held)
        return sum(count * stage.kept for count, stage in zip(counts, held, strict=True))

    def logits(self, layout: Layout) -> float:
        """Return the bytes around the loss, of the rank that has the head."""
        tokens = layout.microbatch_size * self.profile.sequence_length / layout.context
        habits = self.stack.memory
        whole, each = tokens * self.profile.vocabulary_size, habits.logit_bytes
        if habits.gathered_logit_bytes is None:
            whole /= layout.tensor
        else:
            each += habits.gathered_logit_bytes * (1 - 1 / layout.tensor)
        if layout.precision in ("fp32", "tf32", "fp64"):
            # No copies in another precision: logits, log-probabilities, and gradients of both.
            each = 4.0 * activation_bytes(layout.precision) if each > 12 else 2.0 * activation_bytes(layout.precision)
        return whole * each * (habits.fused_share if layout.fused_loss else 1.0)

    def _gathered(self, layout: Layout, held: Sequence[StageSizes]) -> float:
        """Whole weights and gradients that ZeRO-3 gathers, or the buckets in which gradients travel."""
        element, habits = activation_bytes(layout.precision), self.stack.memory
        if layout.zero == 3 and layout.shard > 1:
            widest = max(stage.widest for stage in held)
            size = habits.gathered_blocks * widest * element
            if not layout.adapters_only:
                size += widest * (element + (layout.gradient_bytes if layout.gradient_bytes > element else 0))
            if habits.gathers_ends:
                key = memory_key(layout)
                ends = (self.blocks.memory(end, key) for end in (self.profile.stem, self.profile.tail))
                size += sum(end.dense_parameters for end in ends) * element
            return size
        if layout.adapters_only or layout.data * layout.context == 1:
            return 0.0
        return 2 * layout.bucket_bytes + habits.reduction_bytes


class _Tables:
    """Sums over runs of stem, blocks and tail, so that any cut into stages is a subtraction."""

    def __init__(self, memories: Sequence[BlockMemory]) -> None:
        self._memories = memories
        self._dense, self._experts, self._kept = (
            [0.0, *accumulate(memory[column] for memory in memories)] for column in range(3)
        )
        self._found: dict[tuple[tuple[int, ...] | None, int], tuple[StageSizes, ...]] = {}

    def stages(self, cuts: tuple[int, ...] | None, count: int) -> tuple[StageSizes, ...]:
        """Return the stages that begin at block 0 and at the cuts, or `count` even ones; stem and tail belong to the
        ends."""
        key = (cuts, count)
        if key not in self._found:
            blocks = len(self._memories) - 2
            chosen = cuts if cuts is not None else tuple(blocks * stage // count for stage in range(1, count))
            starts = [0, *(cut + 1 for cut in chosen)]
            ends = [*starts[1:], len(self._memories)]
            self._found[key] = tuple(self._stage(start, end) for start, end in zip(starts, ends, strict=True))
        return self._found[key]

    def _stage(self, start: int, end: int) -> StageSizes:
        inside = self._memories[max(1, start) : min(end, len(self._memories) - 1)]
        return StageSizes(
            dense=self._dense[end] - self._dense[start],
            experts=self._experts[end] - self._experts[start],
            kept=self._kept[end] - self._kept[start],
            live=max((memory.live_bytes for memory in inside), default=0.0),
            widest=max((memory.dense_parameters + memory.expert_parameters for memory in inside), default=0.0),
        )


def memory_of(
    profile: Profile,
    layout: Layout,
    stack: Stack = WEFT,
    *,
    cuts: Sequence[int] | None = None,
    on_accelerator: bool = True,
) -> tuple[StageMemory, ...]:
    """Return the memory of every pipeline rank; `Memories` does so for many layouts of one model."""
    return Memories(profile, stack, on_accelerator=on_accelerator).of(layout, cuts)
