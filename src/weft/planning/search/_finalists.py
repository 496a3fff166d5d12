"""Turn a row into a priced plan: choose how the axes lie on the hardware, over which ranks ZeRO-3 shards, which blocks
are computed again, what is offloaded, and the size of the buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from weft.config.plan import AXES, Recompute
from weft.planning.price import CostModel, check_layout
from weft.planning.search._acceptance import Acceptance
from weft.planning.search._buckets import USUAL_BUCKET_BYTES, PricedLayout, better, sized, with_best_bucket
from weft.planning.search._objective import Objective
from weft.planning.search._orders import distinct_orders
from weft.planning.search._rows import RecomputeLevel
from weft.planning.search._space import Space, divisors
from weft.techniques.cost_terms import Layout
from weft.techniques.pipeline.schedules import stage_ranks

_MIXTURES_DIFFER = 1.02
"""Times the limit up to which other cuts of a mixture are tried."""
_BUCKETS_MATTER = 1.02
"""Prices up to so many times the limit are tried with other buckets."""

_SHAPE = (
    "pipeline", "context", "tensor", "expert", "sequence_parallel", "tensor_scheme", "context_scheme",
    "expert_exchange", "schedule", "chunks", "microbatch_size", "microbatches", "recompute", "offload", "precision",
)  # fmt: skip
_TIMED = attrgetter(*_SHAPE, "cuts")
"""Fields of a layout that decide the time of a step, without the reduction of gradients and where axes lie."""
_HELD = attrgetter(*_SHAPE, "replicate", "shard", "zero", "reduce_every", "uneven", "fused_loss", "compression")
"""Fields of a layout that decide its memory, without buckets and cuts."""


@dataclass(slots=True)
class Tally:
    """Counts of what pricing found."""

    priced: int = 0
    out_of_memory: int = 0
    invalid: int = 0


class Finalists:
    """Prices layouts of one search."""

    def __init__(self, cost_model: CostModel, space: Space, objective: Objective, acceptance: Acceptance) -> None:
        self._cost_model, self._space, self._objective, self._acceptance = cost_model, space, objective, acceptance
        self._tiers = tuple(tier.devices for tier in cost_model.cluster.links)
        self.tally = Tally()
        self.best: float = math.inf
        """The least score so far."""
        self.compared = 1.0
        """Times the least score up to which plans are priced: more than 1 for a comparison."""
        self.found: dict[Layout, PricedLayout] = {}
        self._bounds: dict[tuple[object, ...], float] = {}
        self._explored: set[Layout] = set()
        self._holds: dict[tuple[object, ...], bool] = {}
        self._buckets_fill = cost_model.memories.framework.memory.bucket_copies > 0 or len(space.bucket_bytes or ()) > 1
        """Whether the size of a bucket may decide what fits, or is one of several."""
        self._fewest_words: dict[tuple[object, ...], tuple[Recompute, ...] | None] = {}

    @property
    def limit(self) -> float:
        """The score from which on nothing is priced."""
        return self.best * self.compared

    def explore(self, row: Layout, least_shard: int) -> None:
        """Price a row in every order of its axes, with every size of its shards from `least_shard` up, recomputation
        and offloading that may score less than the best so far; what fits is in `found`.

        What is left out is too slow by the closed form of its schedule, less what a schedule as played may fall short
        of it (`CostModel.least_seconds`); or computes more again than fits without.
        """
        # Rows of several cases lead to the same layout: each is priced once, whatever order its case had.
        key = replace(row, order=AXES)
        if key in self._explored:
            return
        self._explored.add(key)
        limit = self.limit
        light = self._space.recomputes[0]
        placed = {
            layout: self._bound(replace(layout, recompute=light, offload="none"))
            for layout in self._placed(row, least_shard)
        }
        for layout in sorted(placed, key=placed.__getitem__):  # what is priced first leaves less to the others
            if placed[layout] >= limit:
                break
            for carried in self._carried(layout):
                limit = self._recomputed(carried, limit)

    def _placed(self, row: Layout, least_shard: int) -> Iterator[Layout]:
        """Orders of the axes on the hardware, and ranks over which ZeRO-3 shards."""
        shards = [row.shard]
        if row.shards_weights and least_shard < row.shard:
            inside = [n for n in divisors(row.data) if least_shard <= n <= row.shard]
            # A row stands for all shards of its range; here each has its own price.
            shards = [n for n in inside if (n * row.context) % row.expert == 0]
        for shard in shards:
            here = replace(row, shard=shard, replicate=row.data // shard)
            for order in self._space.orders or distinct_orders(here, self._tiers):
                yield replace(here, order=order)

    def _carried(self, layout: Layout) -> Iterator[Layout]:
        """How gradients travel over data ranks: compressions, and algorithms where they are obeyed."""
        if layout.data * layout.context == 1:
            yield layout
            return
        for compression in self._space.compressions:
            here = replace(layout, compression=compression)
            is_obeyed = replace(here, algorithm="").reduced_by == ""
            for algorithm in self._space.algorithms if is_obeyed else (layout.algorithm,):
                yield replace(here, algorithm=algorithm)

    def _recomputed(self, layout: Layout, limit: float) -> float:
        """Price every recomputation and offloading that is of use: none where less fits, which takes no longer, unless
        activations are offloaded, of which there are fewer where more is computed again.  Of losses by chunks and
        whole ones, which take as long, the one that holds less."""
        words, logits = self._space.recomputes, self._cost_model.memories.logits
        # Both losses take as long, so the one that holds fewer bytes dominates.
        losses = sorted((replace(layout, fused_loss=fused) for fused in self._space.fused_losses), key=logits)
        layout = next((loss for loss in losses if not self._acceptance.problem(loss)), losses[0])
        for place, light in enumerate(words):
            plain = replace(layout, recompute=light)
            # Words are ordered from the least recomputation to the most: each further one takes longer.
            if self._bound(replace(plain, offload="none")) >= limit:
                break
            for offload in self._space.offloads:
                limit = min(limit, self._with_bucket(replace(plain, offload=offload), limit))
            if plain.offload == "none" and self._fits(plain) and not self._acceptance.problem(plain):
                return limit
            # The light word does not fit alone: some blocks take the heavier one.
            for heavy in words[place + 1 :] if self._space.per_block_recompute else ():
                for offload in self._space.offloads:
                    limit = min(
                        limit, self._with_mixture(replace(plain, offload=offload), RecomputeLevel(light, heavy), limit)
                    )
        return limit

    def _with_bucket(self, layout: Layout, limit: float) -> float:
        if self._bound(layout) >= limit or (not self._buckets_fill and not self._fits(layout)):
            return limit
        for start in self._buckets(layout):
            priced = self._priced(start, limit * _BUCKETS_MATTER)
            if priced is not None:
                limit = self._best_bucket(priced, limit)
        return limit

    def _with_mixture(self, layout: Layout, level: RecomputeLevel, limit: float) -> float:
        """Price a layout with as few blocks computed again as fit."""
        best: PricedLayout | None = None
        for start in self._buckets(layout) if self._buckets_fill else (layout,):
            for words, cuts in self._mixtures(start, level):
                mixed = replace(start, recompute=words, cuts=cuts or None)
                # Mixtures come from the fewest blocks computed again: later ones take longer.
                if self._bound(mixed) >= limit * _MIXTURES_DIFFER:
                    break
                priced = mixed if self._buckets_fill else next(self._buckets(mixed))
                best = better(best, self._priced(priced, limit * _BUCKETS_MATTER))
        return limit if best is None else self._best_bucket(best, limit)

    def _best_bucket(self, start: PricedLayout, limit: float) -> float:
        if start.score < limit * _BUCKETS_MATTER:
            start = with_best_bucket(self._cost_model, self._space, start, lambda each: self._priced(each, limit))
        return min(limit, start.score)

    def _buckets(self, layout: Layout) -> Iterator[Layout]:
        """The layout with the bucket of the closed form; where that does not fit, with the usual one too."""
        if self._space.bucket_bytes is not None:
            yield from (replace(layout, bucket_bytes=size) for size in self._space.bucket_bytes)
            return
        best = sized(self._cost_model, self._space, layout)
        yield best
        least = max(USUAL_BUCKET_BYTES, *(self._space.first_bucket_bytes or (0,)))
        if best.bucket_bytes > least and self._buckets_fill and not self._fits(best):
            yield replace(layout, bucket_bytes=least)

    # ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _score(self, seconds: float, layout: Layout) -> float:
        pessimistic = self._objective.pessimistic_seconds(seconds, self._cost_model.framework.spread)
        return self._objective.score(pessimistic, layout.world_size)

    def _bound(self, layout: Layout) -> float:
        """The score by closed form, less what closed forms may be too long, and without the update."""
        groups = self._cost_model.groups(layout)
        sharded = (layout.shard, layout.reduce_every, groups.shard) if layout.shards_weights else None
        statistics = groups.data if self._cost_model.profile.facts.has_batch_norm else None
        key = (
            _TIMED(layout),
            layout.data,
            sharded,
            statistics,
            groups.tensor,
            groups.context,
            groups.expert,
            groups.pipeline,
        )
        if key not in self._bounds:
            seconds = self._cost_model.least_seconds(layout, update=False)
            self._bounds[key] = self._score(seconds, layout)
        return self._bounds[key]

    def _priced(self, layout: Layout, limit: float) -> PricedLayout | None:
        """The price of a layout as it is played; None where it does not fit, or is above `limit` by its closed form."""
        if layout in self.found:
            return self.found[layout]
        if check_layout(self._cost_model.profile, self._cost_model.cluster, layout):
            self.tally.invalid += 1
            return None
        self.tally.priced += 1
        if not self._fits(layout):
            return None
        if self._score(self._cost_model.least_seconds(layout), layout) >= limit or not self._acceptance.takes(layout):
            return None
        priced = PricedLayout(self._score(self._cost_model.step_seconds(layout, exact=True), layout), layout)
        self.found[layout] = priced
        self.best = min(self.best, priced.score)
        return priced

    def _fits(self, layout: Layout) -> bool:
        cuts = layout.cuts
        if layout.pipeline > 1 and cuts is None:  # they are by cost, and so depend on the order
            cuts = self._cost_model.model_cost(layout).cuts(layout)
        key = (_HELD(layout), layout.bucket_bytes * self._buckets_fill, cuts)
        if key not in self._holds:
            need = self._cost_model.memories.fullest(layout, cuts)
            self._holds[key] = need <= self._cost_model.cluster.usable_memory_bytes
            self.tally.out_of_memory += not self._holds[key]
        return self._holds[key]

    def _mixtures(
        self, layout: Layout, level: RecomputeLevel
    ) -> Iterator[tuple[tuple[Recompute, ...], tuple[int, ...]]]:
        """Words per block and cuts: in every stage as few `heavy` blocks as fit, stages cut for the light word, then
        for these words."""
        blocks = len(self._cost_model.profile.blocks)
        words: tuple[Recompute, ...] = (level.light,) * blocks
        for _ in range(3):
            cuts = self._cost_model.model_cost(replace(layout, recompute=words)).cuts(layout)
            mixture = self._fewest(replace(layout, cuts=cuts), level, cuts)
            if mixture is None or mixture == words:
                return
            words = mixture
            yield words, cuts

    def _fewest(self, layout: Layout, level: RecomputeLevel, cuts: tuple[int, ...]) -> tuple[Recompute, ...] | None:
        """The fewest heavy blocks of every pipeline rank, exactly; None where even all of them do not fit."""
        key = (_HELD(layout), layout.bucket_bytes * self._buckets_fill, level, cuts)
        if key not in self._fewest_words:
            self._fewest_words[key] = self._find_fewest(layout, level, cuts)
        return self._fewest_words[key]

    def _find_fewest(
        self, layout: Layout, level: RecomputeLevel, cuts: tuple[int, ...]
    ) -> tuple[Recompute, ...] | None:
        starts, blocks = (0, *cuts), len(self._cost_model.profile.blocks)
        ends = (*cuts, blocks)
        ranks = self._blocks_of_ranks(layout, starts, ends)
        low, high = [0] * len(ranks), [len(held) for held in ranks]
        if not all(self._fitting(layout, level, ranks, high)):
            return None
        # A bisection for all ranks at once: a rank's need depends on its own blocks alone and falls with every block
        # that is computed again. Ends after log2(blocks) rounds.
        while any(a < b for a, b in zip(low, high, strict=True)):
            middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            for rank, fits in enumerate(self._fitting(layout, level, ranks, middle)):
                if fits:
                    high[rank] = middle[rank]
                elif low[rank] < high[rank]:
                    low[rank] = middle[rank] + 1
        return self._words(level, ranks, high)

    def _blocks_of_ranks(self, layout: Layout, starts: tuple[int, ...], ends: tuple[int, ...]) -> list[list[int]]:
        owners = stage_ranks(layout.schedule, layout.pipeline, layout.chunks) if layout.num_stages > 1 else (0,)
        blocks_of_ranks: list[list[int]] = [[] for _ in range(layout.pipeline)]
        for owner, start, end in zip(owners, starts, ends, strict=True):
            blocks_of_ranks[owner] += range(start, end)
        return blocks_of_ranks

    def _words(self, level: RecomputeLevel, ranks: list[list[int]], counts: list[int]) -> tuple[Recompute, ...]:
        words: list[Recompute] = [level.light] * sum(len(blocks) for blocks in ranks)
        for blocks, count in zip(ranks, counts, strict=True):
            for block in blocks[:count]:
                words[block] = level.heavy
        return tuple(words)

    def _fitting(self, layout: Layout, level: RecomputeLevel, ranks: list[list[int]], counts: list[int]) -> list[bool]:
        words = self._words(level, ranks, counts)
        needs = self._cost_model.memories.device_bytes(replace(layout, recompute=words))
        return [need <= self._cost_model.cluster.usable_memory_bytes for need in needs]
