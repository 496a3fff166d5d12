"""From a promising row to a priced plan: which blocks are computed again, how the axes lie on the hardware, and the
settings that only change communication."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

from weft.plan import Recompute, stage_ranks
from weft.price import Layout, Pricer, check_layout
from weft.search._buckets import USUAL_BUCKET_BYTES, sized, with_best_bucket
from weft.search._group import count_blocks
from weft.search._objective import Objective
from weft.search._orders import distinct_orders
from weft.search._rows import Level, levels_of
from weft.search._space import Space, divisors

_CLOSED_FORM_EXCESS = 0.98
"""Of a closed form: no schedule as played was shorter."""
_BUCKETS_MATTER = 1.05
"""Prices up to so many times the limit are tried with other buckets."""
_ROUNDING = 1.0 - 1e-12


class Priced(NamedTuple):
    """A layout with its price."""

    score: float
    layout: Layout


@dataclass(slots=True)
class Tally:
    """What pricing found, counted."""

    priced: int = 0
    out_of_memory: int = 0
    invalid: int = 0


class Finalists:
    """Prices layouts of one search."""

    def __init__(self, pricer: Pricer, space: Space, objective: Objective) -> None:
        self._pricer, self._space, self._objective = pricer, space, objective
        self._tiers = tuple(tier.devices for tier in pricer.cluster.links)
        self._levels = levels_of(space)
        self._blocks = count_blocks(pricer.profile)
        self.tally = Tally()
        self.best: float = math.inf
        """The least score so far."""
        self.found: dict[Layout, Priced] = {}
        self._bounds: dict[Layout, float] = {}

    def explore(self, row: Layout, limit: float) -> None:
        """Price a row in every lesser setting and with every recomputation and offloading that may score less than
        `limit`; what fits is in `found`.

        What is left out is too slow by its blocks alone, or by the closed form of its schedule, of which a schedule as
        played falls short by no more than `_CLOSED_FORM_EXCESS`.
        """
        for variant in self._variants(row):
            for level in self._levels:
                if self._least(variant, level.light) >= limit:
                    continue
                for offload in self._space.offloads:
                    if level.is_mixed and offload != "none":
                        continue
                    layout = replace(variant, recompute=level.light, offload=offload)
                    for placed in self._placed(layout):
                        limit = min(limit, self._explore(placed, level, limit))

    def seed(self, row: Layout, *, limit: float = math.inf, quick: bool = True) -> None:
        """Price a row in its usual settings with the least recomputation and offloading that fit, where that may score
        less than `limit` and, without one, than the best."""
        fitting: set[Recompute] = set()
        limit = self.best if limit == math.inf else limit
        if self._bound(row) >= limit:
            return
        for level in self._levels:
            layout = replace(row, recompute=level.light)
            if level.is_mixed:
                if level.light not in fitting:
                    self._explore(layout, level, limit, quick=quick)
                continue
            for offload in () if fitting else self._space.offloads:
                layout = replace(row, recompute=level.light, offload=offload)
                self._explore(layout, level, limit)
                if offload == "none" and self._fits(layout):
                    fitting.add(level.light)

    def _explore(self, layout: Layout, level: Level, limit: float, *, quick: bool = False) -> float:
        """Price a layout with its buckets, and return the least score; `quick`: fewer mixtures of recomputation."""
        if self._bound(layout) >= limit:
            return limit
        best: Priced | None = None
        for start in self._buckets(layout, every=level.is_mixed and not quick):
            if not level.is_mixed:
                best = self._priced(start, limit)
                if best is not None:
                    break
            elif not self._fits(start):
                for words, cuts in islice(self._mixtures(start, level), 1 if quick else None):
                    best = _better(best, self._priced(replace(start, recompute=words, cuts=cuts or None), limit))
        if best is not None and best.score < limit * _BUCKETS_MATTER:
            best = with_best_bucket(self._pricer, self._space, best, lambda each: self._priced(each, limit))
        return limit if best is None else min(limit, best.score)

    def _buckets(self, layout: Layout, *, every: bool) -> Iterator[Layout]:
        """The layout with the usual bucket; where that does not fit, or `every` is wanted, with the best one too, which
        leaves more or less room for activations."""
        if self._space.bucket_bytes is not None:
            yield from (replace(layout, bucket_bytes=size) for size in self._space.bucket_bytes)
            return
        usual = replace(layout, bucket_bytes=max(USUAL_BUCKET_BYTES, *(self._space.first_bucket_bytes or (0,))))
        yield usual
        if every or not self._fits(usual):
            other = sized(self._pricer, self._space, layout)
            if other.bucket_bytes != usual.bucket_bytes:
                yield other

    # ── what they do ──────────────────────────────────────────────────────────────────────────────────────────────

    def _score(self, seconds: float, layout: Layout) -> float:
        pessimistic = self._objective.pessimistic_seconds(seconds, self._pricer.stack.spread)
        return self._objective.score(pessimistic, layout.world_size)

    def _least(self, layout: Layout, word: Recompute) -> float:
        """A score that no layout with these blocks falls below: what the blocks take, shared out evenly."""
        seconds = 0.0
        for block, count in self._blocks:
            cost = self._pricer.block_cost(block, layout)
            one = cost.forward.seconds + cost.input.seconds + cost.weight.seconds + cost.again(word).seconds
            seconds += count * one
        return self._score(seconds * layout.microbatches / layout.pipeline * _ROUNDING, layout)

    def _bound(self, layout: Layout) -> float:
        """The score by closed form, less what closed forms may be too long, and without the update."""
        if layout not in self._bounds:
            seconds = self._pricer.step_seconds(layout, update=False) * _CLOSED_FORM_EXCESS
            self._bounds[layout] = self._score(seconds, layout)
        return self._bounds[layout]

    def _priced(self, layout: Layout, limit: float) -> Priced | None:
        """The price of a layout as it is played; None where it does not fit, or is above `limit` by its closed form."""
        if layout in self.found:
            return self.found[layout]
        if check_layout(self._pricer.profile, self._pricer.cluster, layout):
            self.tally.invalid += 1
            return None
        if not self._fits(layout):
            self.tally.out_of_memory += 1
            self.tally.priced += 1
            return None
        closed = self._score(self._pricer.step_seconds(layout) * _CLOSED_FORM_EXCESS, layout)
        if closed >= limit:
            return None
        self.tally.priced += 1
        found = Priced(self._score(self._pricer.step_seconds(layout, exact=True), layout), layout)
        self.found[layout] = found
        self.best = min(self.best, found.score)
        return found

    def _fits(self, layout: Layout) -> bool:
        cuts = self._pricer.whole(layout).cuts(layout)
        return self._pricer.memories.fullest(layout, cuts) <= self._pricer.cluster.device_memory_bytes

    def _variants(self, layout: Layout) -> Iterator[Layout]:
        """Lesser settings that change what blocks cost or keep, the order of the axes left out."""
        space = self._space
        has_tensor, has_context = layout.tensor > 1, layout.context > 1
        travels = layout.data * layout.context > 1
        is_obeyed = replace(layout, algorithm="").reduced_by == "" and space.compressions == ("none",)
        for parallel, scheme, way, fused, squeeze, by in product(
            space.sequence_parallels if has_tensor else (layout.sequence_parallel,),
            space.tensor_schemes if has_tensor else (layout.tensor_scheme,),
            space.context_schemes if has_context else (layout.context_scheme,),
            space.fused_losses,
            space.compressions if travels else (layout.compression,),
            space.algorithms if travels and is_obeyed else (layout.algorithm,),
        ):
            found = replace(
                layout,
                sequence_parallel=parallel,
                tensor_scheme=scheme,
                context_scheme=way,
                fused_loss=fused,
                compression=squeeze,
                algorithm=by,
            )
            if not check_layout(self._pricer.profile, self._pricer.cluster, found):
                yield found

    def _placed(self, layout: Layout) -> Iterator[Layout]:
        """Orders of the axes on the hardware, and ranks over which ZeRO-3 shards."""
        shards = [layout.shard]
        if layout.zero == 3 and layout.data > 1 and self._space.shards is None:
            shards = [n for n in divisors(layout.data) if n > 1 and (n * layout.context) % layout.expert == 0]
        for shard in shards:
            here = replace(layout, shard=shard, replicate=layout.data // shard)
            for order in self._space.orders or distinct_orders(here, self._tiers):
                yield replace(here, order=order)

    def _mixtures(self, layout: Layout, level: Level) -> Iterator[tuple[tuple[Recompute, ...], tuple[int, ...]]]:
        """Words per block and cuts: in every stage as few `heavy` blocks as fit, stages cut for the light word, then
        for these words."""
        blocks = len(self._pricer.profile.blocks)
        words: tuple[Recompute, ...] = (level.light,) * blocks
        for _ in range(3):
            cuts = self._pricer.whole(replace(layout, recompute=words)).cuts(layout)
            found = self._fewest(replace(layout, cuts=cuts), level, cuts)
            if found is None or found == words:
                return
            words = found
            yield words, cuts

    def _fewest(self, layout: Layout, level: Level, cuts: tuple[int, ...]) -> tuple[Recompute, ...] | None:
        """The fewest heavy blocks of every pipeline rank, exactly; None where even all of them do not fit."""
        starts, blocks = (0, *cuts), len(self._pricer.profile.blocks)
        ends = (*cuts, blocks)
        ranks = self._blocks_of_ranks(layout, starts, ends)
        low, high = [0] * len(ranks), [len(held) for held in ranks]
        if not all(self._fitting(layout, level, ranks, high)):
            return None
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
        held: list[list[int]] = [[] for _ in range(layout.pipeline)]
        for owner, start, end in zip(owners, starts, ends, strict=True):
            held[owner] += range(start, end)
        return held

    def _words(self, level: Level, ranks: list[list[int]], counts: list[int]) -> tuple[Recompute, ...]:
        words: list[Recompute] = [level.light] * sum(len(held) for held in ranks)
        for held, count in zip(ranks, counts, strict=True):
            for block in held[:count]:
                words[block] = level.heavy
        return tuple(words)

    def _fitting(self, layout: Layout, level: Level, ranks: list[list[int]], counts: list[int]) -> list[bool]:
        words = self._words(level, ranks, counts)
        needs = self._pricer.memories.device_bytes(replace(layout, recompute=words))
        return [need <= self._pricer.cluster.device_memory_bytes for need in needs]


def _better(one: Priced | None, other: Priced | None) -> Priced | None:
    """The lower score; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.score < one.score else one
