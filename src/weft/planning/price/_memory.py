"""How much memory every pipeline rank needs, by kind, at the fullest moment of a step.

Sources: model states after Rajbhandari et al. 2020 (arXiv 1910.02054); activations after Korthikanti et al. 2022 (arXiv
2205.05198); microbatches in flight from the schedules themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from weft.config.plan import Recompute
from weft.model.profile import Profile
from weft.planning.price._block_memory import BlockMemories, BlockMemory, MemoryKey, memory_key
from weft.planning.price._prediction import StageMemory
from weft.planning.price._rank_memory import RankMemory, RankShare
from weft.techniques.cost_terms import WEFT, Framework, Layout
from weft.techniques.fused_loss.cost import loss_bytes
from weft.techniques.offload.cost import BLOCKS_HERE
from weft.techniques.pipeline.cost import FOLDED, in_flight
from weft.techniques.pipeline.schedules import stage_ranks


class StageSizes(NamedTuple):
    """One stage of one rank: elements of weights, and bytes of one microbatch."""

    dense: float
    experts: float
    kept: float
    of_ends: float
    """Bytes of `kept` that belong to stem and tail."""
    of_block: float
    """Bytes that the block with the most keeps."""
    live: float
    widest: float
    """Elements of the largest block's weights, experts included."""


class Memories:
    """Memory of layouts of one model under one framework; keeps every part that several layouts share."""

    def __init__(self, profile: Profile, framework: Framework = WEFT, *, on_accelerator: bool = True) -> None:
        if not on_accelerator:
            # torch has no kernels of its own for root-mean-square norms and dropouts on CPUs.
            framework = replace(framework, memory=replace(framework.memory, fused_norms=False, masks_in_bytes=False))
        self.profile, self.framework, self.on_accelerator = profile, framework, on_accelerator
        self.blocks = BlockMemories(profile, framework)
        self._tables: dict[tuple[MemoryKey, Recompute | tuple[Recompute, ...]], _PrefixSums] = {}
        self._held: dict[tuple[object, ...], tuple[tuple[StageSizes, ...], ...]] = {}

    def of(self, layout: Layout, cuts: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
        """Return the memory of every pipeline rank.  `cuts` stand in for the layout's where it leaves them open; where
        both do, blocks are shared out evenly."""
        layout = self._here(layout)
        memory = self.of_ranks(layout)
        stages: list[StageMemory] = []
        for rank, share in enumerate(self._shares(layout, cuts)):
            kinds = memory.kinds(share)
            reserved = kinds.allocated * memory.reserved
            stages.append(StageMemory(rank=rank, kinds=kinds, reserved=reserved, device=reserved + memory.outside))
        return tuple(stages)

    def fullest(self, layout: Layout, cuts: Sequence[int] | None = None) -> float:
        """Return the device bytes of the fullest pipeline rank, as `of` does, quickly."""
        return max(self.device_bytes(layout, cuts))

    def device_bytes(self, layout: Layout, cuts: Sequence[int] | None = None) -> list[float]:
        """Return the device bytes of every pipeline rank, as `of` does, quickly."""
        layout = self._here(layout)
        memory = self.of_ranks(layout)
        return [memory.device_bytes(share) for share in self._shares(layout, cuts)]

    def of_ranks(self, layout: Layout) -> RankMemory:
        """Return what all ranks of a layout share.  Its sizes may be columns, but for those that blocks depend on
        (`memory_key`)."""
        key = memory_key(layout)
        # Weights of stem and tail: under ZeRO-3 some frameworks hold them gathered for a whole step.
        ends = sum(self.blocks.memory(end, key).dense_parameters for end in (self.profile.stem, self.profile.tail))
        return RankMemory.of(layout, self.framework, ends=ends, on_accelerator=self.on_accelerator)

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
            # An interleaved rank has several stages that do not lie beside one another.
            ranks = stage_ranks(layout.schedule, layout.pipeline, layout.chunks) if stages > 1 else (0,)
            held: list[list[StageSizes]] = [[] for _ in range(layout.pipeline)]
            for stage, owner in zip(of_stages, ranks, strict=True):
                held[owner].append(stage)
            self._held[index] = tuple(map(tuple, held))
        return self._held[index]

    def _table(self, key: MemoryKey, words: Recompute | tuple[Recompute, ...]) -> _PrefixSums:
        if (key, words) not in self._tables:
            each = (words,) * len(self.profile.blocks) if isinstance(words, str) else words
            blocks = self.profile.parts
            pairs = zip(blocks, ("none", *each, "none"), strict=True)
            self._tables[key, words] = _PrefixSums([self.blocks.memory(block, key, word) for block, word in pairs])
        return self._tables[key, words]

    def _shares(self, layout: Layout, cuts: Sequence[int] | None) -> Iterator[RankShare]:
        """Yield the weights and activations of each pipeline rank."""
        folded = layout.pipeline > 1 and layout.schedule in FOLDED
        head_rank = 0 if folded else layout.pipeline - 1
        # A tied weight stands on both ends of the pipeline, unless one rank has both.
        is_tied = self.profile.tied and layout.pipeline > 1 and not folded
        tied = self.profile.vocabulary_size * self.profile.hidden_size / layout.tensor if is_tied else 0.0
        logits = self.logits(layout)
        for rank, stages in enumerate(self._ranks(layout, cuts)):
            has_head = rank == head_rank
            dense = sum(stage.dense for stage in stages)
            yield RankShare(
                dense=dense + tied if has_head else dense,
                experts=sum(stage.experts for stage in stages),
                waiting=self._waiting(layout, rank, stages),
                live=max(stage.live for stage in stages),
                logits=logits if has_head else 0.0,
                widest=max(stage.widest for stage in stages),
            )

    def _waiting(self, layout: Layout, rank: int, stages: Sequence[StageSizes]) -> float:
        """Activations between their forward and their backward."""
        # A stage keeps one microbatch's activations from its forward to its backward; the schedule says how many are
        # between the two at the fullest moment of the rank.
        counts = in_flight(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches, rank)
        waiting = sum(count * stage.kept for count, stage in zip(counts, stages, strict=True))
        if not layout.offloads_activations:
            return waiting
        # Offloaded: only the blocks that are being moved are on the device, and the ends, which are not offloaded.
        ends = sum(count * stage.of_ends for count, stage in zip(counts, stages, strict=True))
        return min(waiting, ends + BLOCKS_HERE * max(stage.of_block for stage in stages))

    def logits(self, layout: Layout) -> float:
        """Bytes around the loss."""
        return loss_bytes(layout, self.profile, self.framework.memory, on_accelerator=self.on_accelerator)


class _PrefixSums:
    """Sums over runs of stem, blocks and tail, so that any cut into stages is a subtraction."""

    def __init__(self, memories: Sequence[BlockMemory]) -> None:
        self._length = len(memories)
        self._dense, self._experts, self._kept = (
            [0.0, *accumulate(memory[column] for memory in memories)] for column in range(3)
        )
        # Of each kind of block, how many stand before a place: few kinds, so that a run's maxima are quick to find.
        # A maximum is no difference of prefix sums; but a model has few kinds of blocks, and whether a kind is in a run
        # is one.
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
        first, last = max(start, 1), min(end, self._length - 1)
        return StageSizes(
            dense=self._dense[end] - self._dense[start],
            experts=self._experts[end] - self._experts[start],
            kept=self._kept[end] - self._kept[start],
            of_ends=self._kept[end] - self._kept[last] + self._kept[first] - self._kept[start],
            of_block=max((kind.kept_bytes for kind in inside), default=0.0),
            live=max((kind.live_bytes for kind in inside), default=0.0),
            widest=max((kind.dense_parameters + kind.expert_parameters for kind in inside), default=0.0),
        )


def _distinct(memories: Sequence[BlockMemory]) -> list[BlockMemory]:
    """Each object once: alike blocks share theirs."""
    return list({id(memory): memory for memory in memories}.values())
