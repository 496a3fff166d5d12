"""How much memory every pipeline rank needs, by kind, at the fullest moment of a step.

Sources: model states after Rajbhandari et al. 2020 (arXiv 1910.02054); activations after Korthikanti et al. 2022 (arXiv
2205.05198); microbatches in flight from the schedules themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Recompute, stage_ranks
from weft.price._block_memory import BlockMemories, BlockMemory, MemoryKey, activation_bytes, memory_key
from weft.price._in_flight import in_flight
from weft.price._layout import Layout
from weft.price._prediction import MemoryKinds, StageMemory
from weft.price._stack import WEFT, Stack
from weft.profile import Profile
from weft.techniques.registry import held as held_besides
from weft.techniques.zero.contract import shares_of

_CPU_CHUNK_BYTES = float(8 << 20)
"""Bytes of logits that exist at once in a loss by chunks, on a CPU."""
PROCESS_BYTES = 295e6
"""What a rank on a CPU holds beside its tensors: the interpreter, torch, the network, the allocator's remains.
Peaks of `weft train` less the tensors of three small models on 1, 2 and 4 ranks: 293 to 303 MB (2026-11, torch 2.13).
"""


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


def states_of(layout: Layout, *, experts: bool = False, whole_gradients: bool = False) -> States:
    """Return bytes of model states per element.  ZeRO-1 and 2 shard over data × context (over shard × context under
    local steps), ZeRO-3 over shard × context; experts, which the expert axis has shared out already, over as many ranks
    less, and over the tensor axis, whose ranks have whole experts and share out the tokens.  `whole_gradients`: they
    are reduced once per step, so that ZeRO-2 and 3 hold them whole until then."""
    element = activation_bytes(layout.precision)
    if layout.adapters_only:
        return States(element / (layout.shard * layout.context if layout.shards_weights else 1), 0.0, 0.0)
    shards = (layout.shard if layout.shards_weights else layout.summing) * layout.context
    if experts:
        shards = max(1, shards * layout.tensor // layout.expert)
    besides = held_besides(layout)
    optimizer = 0.0 if layout.offloads_optimizer else float(layout.master_bytes)
    optimizer += besides.master_copies * layout.wide_bytes
    owed = besides.gradient_bytes
    kept = shares_of(layout.stage, shards)
    gradients = layout.gradient_bytes * (1.0 if whole_gradients else kept.gradients) + owed * kept.weights
    return States(element * kept.weights, gradients, optimizer * kept.states)


def reduces_once(layout: Layout, stack: Stack) -> bool:
    """Whether ZeRO-2 and 3 reduce gradients once per step, instead of after every microbatch."""
    if layout.reduce_every == "auto":
        return not layout.shards_gradients or (layout.pipeline > 1 and stack.memory.accumulates_whole)
    return layout.reduce_every == "step"


def holds_whole_gradients(layout: Layout, stack: Stack) -> bool:
    """Whether gradients stay whole between microbatches although ZeRO-2 or 3 shares them out."""
    if not layout.shards_gradients:
        return False
    if reduces_once(layout, stack):
        return layout.pipeline > 1 or layout.microbatches > 1
    return layout.uneven and layout.microbatches > 1


def holds_weights(layout: Layout, stack: Stack) -> bool:
    """Whether ZeRO-3 holds gathered weights from a step's first forward to its last backward."""
    gathers = layout.shards_weights and layout.shard * layout.context > 1
    return gathers and stack.memory.holds_gathered and (layout.pipeline > 1 or layout.uneven)


class _Common(NamedTuple):
    """What all pipeline ranks of a layout share."""

    dense: States
    experts: States
    gradient_copies: float
    """Bytes per element."""
    logits: float
    """Bytes around the loss, on the rank that has the head."""
    head_rank: int
    tied: float
    """Elements of the copy of a tied weight on the head's rank."""
    gathers: bool
    """ZeRO-3 with more than one rank."""
    gathered: float
    """ZeRO-3: bytes per element of the widest block."""
    held: float
    """ZeRO-3: bytes per element of all weights of the rank."""
    buffers: float
    """Bytes in which gradients travel, or of the ends that ZeRO-3 keeps whole."""
    workspace: float
    reserved: float
    """Times the allocated bytes."""
    outside: float
    """Bytes outside the allocator."""


class Memories:
    """Memory of layouts of one model under one stack; keeps every part that several layouts share."""

    def __init__(self, profile: Profile, stack: Stack = WEFT, *, on_accelerator: bool = True) -> None:
        if not on_accelerator:
            # torch has no kernels of its own for root-mean-square norms and dropouts on CPUs.
            stack = replace(stack, memory=replace(stack.memory, fused_norms=False, masks_in_bytes=False))
        self.profile, self.stack, self.on_accelerator = profile, stack, on_accelerator
        self.blocks = BlockMemories(profile, stack)
        self._tables: dict[tuple[MemoryKey, Recompute | tuple[Recompute, ...]], _Tables] = {}
        self._held: dict[tuple[object, ...], tuple[tuple[StageSizes, ...], ...]] = {}

    def of(self, layout: Layout, cuts: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
        """Return the memory of every pipeline rank.  `cuts` stand in for the layout's where it leaves them open; where
        both do, blocks are shared out evenly."""
        layout = self._here(layout)
        common = self._common(layout)
        stages: list[StageMemory] = []
        for rank, held in enumerate(self._ranks(layout, cuts)):
            kinds = MemoryKinds(**self._kinds(layout, common, rank, held)._asdict())
            reserved = kinds.allocated * common.reserved
            stages.append(StageMemory(rank=rank, kinds=kinds, reserved=reserved, device=reserved + common.outside))
        return tuple(stages)

    def fullest(self, layout: Layout, cuts: Sequence[int] | None = None) -> float:
        """Return the device bytes of the fullest pipeline rank, as `of` does, quickly."""
        return max(self.device_bytes(layout, cuts))

    def device_bytes(self, layout: Layout, cuts: Sequence[int] | None = None) -> list[float]:
        """Return the device bytes of every pipeline rank, as `of` does, quickly."""
        layout = self._here(layout)
        common = self._common(layout)
        return [
            sum(self._kinds(layout, common, rank, held)) * common.reserved + common.outside
            for rank, held in enumerate(self._ranks(layout, cuts))
        ]

    def _here(self, layout: Layout) -> Layout:
        """The layout without what has no effect: the host's memory is the cores' own."""
        return layout if self.on_accelerator or not layout.offloads_to_host else layout.kept_on_device()

    def _ranks(self, layout: Layout, cuts: Sequence[int] | None) -> tuple[tuple[StageSizes, ...], ...]:
        """The stages of each pipeline rank."""
        chosen = layout.cuts if layout.cuts is not None else None if cuts is None else tuple(cuts)
        stages, key = layout.num_stages, memory_key(layout)
        index = (key, layout.recompute, chosen, layout.pipeline, layout.chunks, layout.schedule)
        if index not in self._held:
            of_stages = self._table(key, layout.recompute).stages(chosen, stages)
            ranks = stage_ranks(layout.schedule, layout.pipeline, layout.chunks) if stages > 1 else (0,)
            held: list[list[StageSizes]] = [[] for _ in range(layout.pipeline)]
            for stage, owner in zip(of_stages, ranks, strict=True):
                held[owner].append(stage)
            self._held[index] = tuple(map(tuple, held))
        return self._held[index]

    def _table(self, key: MemoryKey, words: Recompute | tuple[Recompute, ...]) -> _Tables:
        if (key, words) not in self._tables:
            each = (words,) * len(self.profile.blocks) if isinstance(words, str) else words
            blocks = (self.profile.stem, *self.profile.blocks, self.profile.tail)
            pairs = zip(blocks, ("none", *each, "none"), strict=True)
            self._tables[key, words] = _Tables([self.blocks.memory(block, key, word) for block, word in pairs])
        return self._tables[key, words]

    def _common(self, layout: Layout) -> _Common:
        habits, element = self.stack.memory, activation_bytes(layout.precision)
        folded = layout.pipeline > 1 and layout.schedule in ("zbv", "dualpipev")
        is_tied = self.profile.tied and layout.pipeline > 1 and not folded
        gathers = layout.shards_weights and layout.shard * layout.context > 1
        copies = 0.0 if layout.adapters_only or layout.shards_weights else habits.gradient_copies * element
        axes = (layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert)
        communicators = sum(size > 1 for size in axes) * habits.communicator_bytes
        wide = layout.gradient_bytes if layout.gradient_bytes > element else 0
        whole = holds_whole_gradients(layout, self.stack)
        holds = holds_weights(layout, self.stack)
        return _Common(
            dense=states_of(layout, whole_gradients=whole),
            experts=states_of(layout, experts=True, whole_gradients=whole),
            gradient_copies=copies,
            logits=self.logits(layout),
            head_rank=0 if folded else layout.pipeline - 1,
            tied=self.profile.vocabulary_size * self.profile.hidden_size / layout.tensor if is_tied else 0.0,
            gathers=gathers,
            gathered=(0.0 if holds else habits.gathered_blocks * element)
            + (0 if layout.adapters_only or whole else element + wide),
            held=float(element) if holds else 0.0,
            buffers=self._buffers(layout, gathers=gathers),
            workspace=habits.workspace_bytes if self.on_accelerator else 0.0,
            reserved=1 + habits.fragmentation if self.on_accelerator else 1.0,
            outside=habits.context_bytes + communicators if self.on_accelerator else PROCESS_BYTES,
        )

    def _kinds(self, layout: Layout, common: _Common, rank: int, held: Sequence[StageSizes]) -> _Kinds:
        dense = sum(stage.dense for stage in held)
        experts = sum(stage.experts for stage in held)
        live = max(stage.live for stage in held)
        logits = 0.0
        if rank == common.head_rank:
            dense, logits = dense + common.tied, common.logits
        plain, routed = common.dense, common.experts
        buckets = common.buffers
        if common.gathers:
            buckets += common.gathered * max(stage.widest for stage in held) + common.held * (dense + experts)
        return _Kinds(
            dense * plain.weights + experts * routed.weights,
            dense * plain.gradients + experts * routed.gradients + common.gradient_copies * (dense + experts),
            dense * plain.optimizer + experts * routed.optimizer,
            # The loss is over before the last block's backward begins: the larger of both counts.
            self._waiting(layout, rank, held) + (live if live > logits else 0.0),
            logits if logits >= live else 0.0,
            buckets,
            common.workspace,
        )

    def _waiting(self, layout: Layout, rank: int, held: Sequence[StageSizes]) -> float:
        """Activations between their forward and their backward."""
        if layout.offloads_activations:
            # One microbatch's chunk is being written or read while another computes.
            return 2 * max(stage.kept for stage in held)
        counts = in_flight(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches, rank)
        return sum(count * stage.kept for count, stage in zip(counts, held, strict=True))

    def logits(self, layout: Layout) -> float:
        """Bytes around the loss."""
        habits, element = self.stack.memory, activation_bytes(layout.precision)
        tokens = layout.microbatch_size * self.profile.sequence_length / layout.context
        whole, each = tokens * self.profile.vocabulary_size, habits.logit_bytes
        if layout.tensor > 1 and habits.parallel_logit_bytes is not None:
            each = habits.parallel_logit_bytes
        if habits.gathered_logit_bytes is None:
            whole /= layout.tensor
        else:
            each += habits.gathered_logit_bytes * (1 - 1 / layout.tensor)
        if element > 2:
            # No copies in another precision: logits, log-probabilities, and gradients of both.
            each = 4.0 * element if each > 12 else 2.0 * element
        if not layout.fuses_loss:
            return whole * each
        chunk = habits.fused_chunk_bytes if self.on_accelerator else _CPU_CHUNK_BYTES
        # The head's gradient is summed in fp32 over the chunks, beside the logits and probabilities of one of them.
        head = self.profile.vocabulary_size * self.profile.hidden_size / layout.tensor
        return min(whole * each, 2 * chunk) + (4.0 * head if element < 4 else 0.0)

    def _buffers(self, layout: Layout, *, gathers: bool) -> float:
        """Buckets of gradients, or the ends of the model that ZeRO-3 keeps whole from forward to backward."""
        habits = self.stack.memory
        if gathers:
            key = memory_key(layout)
            ends = sum(self.blocks.memory(end, key).dense_parameters for end in (self.profile.stem, self.profile.tail))
            held_anyway = holds_weights(layout, self.stack)
            return ends * activation_bytes(layout.precision) if habits.gathers_ends and not held_anyway else 0.0
        if layout.adapters_only:
            return 0.0
        travels = layout.data * layout.context > 1
        buckets = habits.bucket_copies * layout.bucket_limits[1] if travels else 0.0
        return buckets + habits.reduction_bytes


class _Kinds(NamedTuple):
    """`MemoryKinds`, quicker to make."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buckets: float
    workspace: float


class _Tables:
    """Sums over runs of stem, blocks and tail, so that any cut into stages is a subtraction."""

    def __init__(self, memories: Sequence[BlockMemory]) -> None:
        self._length = len(memories)
        self._dense, self._experts, self._kept = (
            [0.0, *accumulate(memory[column] for memory in memories)] for column in range(3)
        )
        # Of each kind of block, how many stand before a place: few kinds, so that a run's maxima are quick to find.
        inside = [None, *memories[1:-1], None]
        self._before = [
            (kind, [0, *accumulate(memory is kind for memory in inside)]) for kind in _distinct(memories[1:-1])
        ]
        self._found: dict[tuple[tuple[int, ...] | None, int], tuple[StageSizes, ...]] = {}

    def stages(self, cuts: tuple[int, ...] | None, count: int) -> tuple[StageSizes, ...]:
        """Return the stages that begin at block 0 and at the cuts, or `count` even ones; stem and tail belong to the
        ends."""
        key = (cuts, count)
        if key not in self._found:
            blocks = self._length - 2
            chosen = cuts if cuts is not None else tuple(blocks * stage // count for stage in range(1, count))
            starts = [0, *(cut + 1 for cut in chosen)]
            ends = [*starts[1:], self._length]
            self._found[key] = tuple(self._stage(start, end) for start, end in zip(starts, ends, strict=True))
        return self._found[key]

    def _stage(self, start: int, end: int) -> StageSizes:
        inside = [kind for kind, before in self._before if before[end] > before[start]]
        return StageSizes(
            dense=self._dense[end] - self._dense[start],
            experts=self._experts[end] - self._experts[start],
            kept=self._kept[end] - self._kept[start],
            live=max((kind.live_bytes for kind in inside), default=0.0),
            widest=max((kind.dense_parameters + kind.expert_parameters for kind in inside), default=0.0),
        )


def _distinct(memories: Sequence[BlockMemory]) -> list[BlockMemory]:
    """Each object once: alike blocks share theirs."""
    return list({id(memory): memory for memory in memories}.values())


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
