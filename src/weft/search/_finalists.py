"""From a promising row to a priced plan: which blocks are computed again, how the axes lie on the hardware, and the
settings that only change communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from weft.plan import Recompute, stage_ranks
from weft.price import Layout, Pricer, check_layout
from weft.search._buckets import USUAL_BUCKET_BYTES, sized, with_best_bucket
from weft.search._objective import Objective
from weft.search._orders import distinct_orders
from weft.search._rows import Level
from weft.search._space import Space, divisors

_ALL_TOGETHER = 48
"""Up to so many combinations of a finalist's lesser settings are all priced; of more, one setting is changed at a time
until none helps."""


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
        self.tally = Tally()
        self._seen: dict[Layout, Priced | None] = {}

    def price(self, layout: Layout, level: Level) -> Priced | None:
        """Return a row's price with the least recomputation of its level that fits, or None where nothing fits.

        Its bucket is what the gradients and the link ask for, but no larger than usual: memory decides what fits.
        """
        layout = sized(self._pricer, self._space, layout, most=USUAL_BUCKET_BYTES)
        if not level.is_mixed:
            return self._priced(layout)
        best: Priced | None = None
        for words, cuts in self._mixtures(layout, level):
            best = _better(best, self._priced(replace(layout, recompute=words, cuts=cuts or None)))
        return best

    def refine(self, start: Priced) -> Priced:
        """Return the best of a finalist's lesser settings: order of the axes, sequence parallelism, schemes, sharding,
        buckets, compression, algorithm."""
        best = self._refined(start)
        return with_best_bucket(self._pricer, self._space, best, self._priced)

    def _refined(self, start: Priced) -> Priced:
        choices = self._lesser(start.layout)
        count = 1
        for _, values in choices:
            count *= len(values)
        if count <= _ALL_TOGETHER:
            return self._best_of(start, choices)
        best = start
        while True:
            before = best
            for choice in self._lesser(best.layout):
                best = self._best_of(best, [choice])
            if best is before:
                return best

    def played(self, found: Priced) -> Priced:
        """Return the price with the schedule played action by action, which knows what closed forms leave out."""
        return self._scored(found.layout, exact=True)

    # ── what they do ──────────────────────────────────────────────────────────────────────────────────────────────

    def _scored(self, layout: Layout, *, exact: bool = False) -> Priced:
        seconds = self._pricer.time(layout, exact=exact).total
        pessimistic = self._objective.pessimistic_seconds(seconds, self._pricer.stack.spread)
        return Priced(self._objective.score(pessimistic, layout.world_size), layout)

    def _priced(self, layout: Layout) -> Priced | None:
        if layout in self._seen:
            return self._seen[layout]
        found: Priced | None = None
        if check_layout(self._pricer.profile, self._pricer.cluster, layout):
            self.tally.invalid += 1
        else:
            self.tally.priced += 1
            if self._fits(layout):
                found = self._scored(layout)
            else:
                self.tally.out_of_memory += 1
        self._seen[layout] = found
        return found

    def _fits(self, layout: Layout) -> bool:
        cuts = self._pricer.whole(layout).cuts(layout)
        return self._pricer.memories.fullest(layout, cuts) <= self._pricer.cluster.usable_memory_bytes

    def _best_of(self, start: Priced, choices: list[tuple[str, tuple[object, ...]]]) -> Priced:
        best = start
        names = [name for name, _ in choices]
        for values in product(*(values for _, values in choices)):
            changes = dict(zip(names, values, strict=True))
            if "shard" in changes:
                changes["replicate"] = start.layout.data // int(str(changes["shard"]))
            best = _better(best, self._priced(replace(start.layout, **changes))) or best  # pyright: ignore[reportArgumentType]
        return best

    def _lesser(self, layout: Layout) -> list[tuple[str, tuple[object, ...]]]:
        space, found = self._space, list[tuple[str, tuple[object, ...]]]()
        if layout.zero == 3 and space.shards is None and space.replicas:
            room = [n for n in divisors(layout.data) if n > 1 and (n * layout.context) % layout.expert == 0]
            found.append(("shard", tuple(room)))
        orders = space.orders or tuple(distinct_orders(layout, self._tiers))
        found.append(("order", orders))
        if layout.tensor > 1:
            found.append(("sequence_parallel", space.sequence_parallels))
            found.append(("tensor_scheme", space.tensor_schemes))
        if layout.context > 1:
            found.append(("context_scheme", space.context_schemes))
        if layout.data * layout.context > 1:
            found.append(("bucket_bytes", space.bucket_bytes or (layout.bucket_bytes,)))
            found.append(("compression", space.compressions))
            is_obeyed = replace(layout, algorithm="").reduced_by == "" and space.compressions == ("none",)
            found.append(("algorithm", space.algorithms if is_obeyed else (layout.algorithm,)))
        found.append(("fused_loss", space.fused_losses))
        return [(name, values) for name, values in found if len(values) > 1]

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
        stages = self._pricer.memories.of(replace(layout, recompute=words))
        return [stage.device <= self._pricer.cluster.usable_memory_bytes for stage in stages]


def _better(one: Priced | None, other: Priced | None) -> Priced | None:
    """The lower score; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.score < one.score else one
