"""All layouts of a group of splits, with the least that each may take; those that may fit and be among the best."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.config.plan import Recompute
from weft.planning.price import CostModel
from weft.planning.search._bounds import Floats
from weft.planning.search._estimate import Estimates, RateTable, power_below
from weft.planning.search._group import GroupCosts, PassSeconds
from weft.planning.search._options import OptionMaker, Options, ShardingOption, sharding_options
from weft.planning.search._pipelines import pipeline_seconds
from weft.planning.search._rows import REDUCE_EVERY, LayoutRows, levels_of
from weft.planning.search._space import Offload, Space
from weft.planning.search._splits import Bools, Ints, Splits
from weft.planning.search._variants import has_even_islands

_ROWS_AT_ONCE = 100_000
"""Options and cases that are computed together: few enough that their columns stay small."""


class Screen:
    """Screens groups of splits of one model on one cluster."""

    def __init__(self, cost_model: CostModel, space: Space) -> None:
        self._cost_model, self._space = cost_model, space
        self._levels = levels_of(space)
        self._usable = cost_model.cluster.usable_memory_bytes
        self._rates = RateTable(cost_model, space)
        self._choices = OptionMaker(space, len(cost_model.profile.blocks))
        self._parts_data = any(abs(order.index("replicate") - order.index("shard")) > 1 for order in space.orders or ())
        even = has_even_islands(cost_model.cluster)  # else shards are looked at one by one
        self._islands = tuple(tier.devices for tier in cost_model.cluster.links) if even else ()

    def count(self, splits: Splits) -> int:
        """Return how many layouts there are of some splits."""
        return self._choices.count(splits) * len(self._levels) * len(self._space.offloads) * len(self._space.zeros)

    def rows(self, costs: GroupCosts, splits: Splits, limit: Floats) -> list[LayoutRows]:
        """Return the layouts of a group that may fit and take less than `limit` seconds (of each split), with the least
        that each may take.  A layout is there once for each case."""
        options, row = self._choices.options(splits)
        limit = limit[row]
        farthest = int(costs.inside.max(initial=1))
        rows: list[LayoutRows] = []
        for cases, near, fastest in self._near(costs, options, limit):
            some, here, below = costs.take(cases), options.take(near), limit[near]
            # Sharding changes what a rank holds and sends but not what it computes, so it is tried only on the rows
            # whose pipelines alone are fast enough.
            for sharding in self._ways(here):
                valid = (sharding.shard > 0) & self._is_case(some, here, sharding, farthest)
                if valid.any():
                    taken = (some.take(valid), here.take(valid), sharding.take(valid))
                    rows += self._sharded(*taken, below[valid], fastest[valid])
        return rows

    def _ways(self, options: Options) -> list[ShardingOption]:
        whole = self._cost_model.framework.memory.accumulates_unsharded
        return sharding_options(self._space, options, self._islands, accumulates=whole)

    def _is_case(self, costs: GroupCosts, options: Options, sharding: ShardingOption, farthest: int) -> Bools:
        """Whether the figures of a row's case hold for it; where a given order puts other axes between the data ranks,
        how many of them lie inside depends on the shards too, and all cases are taken."""
        data = sharding.least if sharding.zero == 3 else options.splits.data
        # Times of collectives are tabled by powers of two of the ranks inside; the next lower power keeps the figure a
        # bound.
        alike = np.minimum(power_below(data), farthest)
        lent = np.gcd(sharding.shard, options.splits.expert)
        return (self._parts_data | (costs.inside == 0) | (costs.inside == alike)) & (
            (costs.lent == 0) | (costs.lent == lent)
        )

    def _near(self, costs: GroupCosts, options: Options, limit: Floats) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Yield cases and options whose pipelines alone, nothing computed again, are below the limit, with their
        seconds; not too many at once."""
        blocks, schedules = len(self._cost_model.profile.blocks), self._space.schedules
        passes, known = costs.passes[self._levels[0].light], dict[tuple[float, ...], tuple[Ints, Floats]]()
        cases, rows, seconds, count = list[Ints](), list[Ints](), list[Floats](), 0
        for case in range(len(costs.bases)):
            hop, one = costs.hop[[case]], PassSeconds(*(part[[case]] for part in passes))
            key = (float(hop[0]), *(float(part[0]) for part in one))  # many cases differ in what is sent besides
            if key not in known:
                # The pipeline's time depends on the passes and the hop alone: cases that differ in other traffic share
                # it.
                fastest = pipeline_seconds(schedules, blocks, hop, options, one, 0.0)
                near = np.flatnonzero(fastest < limit)
                known[key] = near, fastest[near]
            near, fastest = known[key]
            rows.append(near)
            seconds.append(fastest)
            cases.append(np.full(len(near), case, dtype=np.int64))
            count += len(near)
            # Few rows are computed together, so that their columns stay small.
            if count > _ROWS_AT_ONCE or (count and case == len(costs.bases) - 1):
                yield np.concatenate(cases), np.concatenate(rows), np.concatenate(seconds)
                cases, rows, seconds, count = [], [], [], 0

    def _sharded(
        self, costs: GroupCosts, options: Options, sharding: ShardingOption, limit: Floats, fastest: Floats
    ) -> list[LayoutRows]:
        """Rows under one way of sharding, whose pipelines take `fastest` seconds with nothing computed again."""
        first, offloads = costs.passes[self._levels[0].light], self._space.offloads
        estimates = Estimates(self._cost_model, self._space, costs, options, sharding, self._rates)
        # More recomputation makes a step longer, and so does offloading, but for the optimizer's where a rank has
        # little of it.  What is too slow without them stays so.
        near = estimates.seconds(first, "none", *offloads, pipeline=fastest) < limit
        if not near.any():
            return []
        costs, options, sharding, limit = costs.take(near), options.take(near), sharding.take(near), limit[near]
        estimates = Estimates(self._cost_model, self._space, costs, options, sharding, self._rates)
        least = self._least(estimates, costs, len(options))
        return self._table(costs, options, least < limit, sharding, least)

    def _least(self, estimates: Estimates, costs: GroupCosts, count: int) -> Floats:
        """The least seconds with what must be computed again or offloaded to fit; infinite where nothing fits."""
        least = np.full(count, np.inf)
        needs: dict[tuple[Recompute, Offload], Floats] = {}
        fits_all, usual = False, self._space.usual_offload
        for light, heavy in self._levels:
            # A mixed level needs the bytes of both of its pure levels, which stand before it in the list.
            if light != heavy:
                for offload in self._space.offloads:
                    if (light, offload) in needs and (heavy, offload) in needs:
                        least = np.minimum(least, self._mixed(estimates, costs, needs, light, heavy, offload))
                continue
            if fits_all and usual == "none":
                continue  # a heavier level takes longer; but where activations must be offloaded, it moves less
            for offload in self._space.offloads:
                need = needs[light, offload] = estimates.device_bytes(costs.held[light], costs.passes[light], offload)
                if offload == usual:
                    fits_all = bool((need <= self._usable).all())
                seconds = estimates.seconds(costs.passes[light], offload)
                least = np.minimum(least, np.where(need <= self._usable, seconds, np.inf))
        return least

    def _mixed(
        self,
        estimates: Estimates,
        costs: GroupCosts,
        needs: dict[tuple[Recompute, Offload], Floats],
        light: Recompute,
        heavy: Recompute,
        offload: Offload,
    ) -> Floats:
        """Seconds when only as many blocks are computed again as needed; infinite where that is of no use."""
        lightly, heavily = needs[light, offload], needs[heavy, offload]
        useful = (lightly > self._usable) & (heavily <= self._usable)
        if not useful.any():
            return np.full(len(useful), np.inf)
        # Time grows linearly with the share of blocks that are computed again: both ends are known.
        share = estimates.least_share(costs.held[light], costs.held[heavy], lightly, self._usable)
        seconds = estimates.seconds(costs.passes[light], offload)
        most = estimates.seconds(costs.passes[heavy], offload)
        return np.where(useful, seconds + share * (most - seconds), np.inf)

    def _table(
        self, costs: GroupCosts, options: Options, chosen: Bools, sharding: ShardingOption, seconds: Floats
    ) -> list[LayoutRows]:
        if not chosen.any():
            return []
        taken, sharding, count = options.take(chosen), sharding.take(chosen), int(chosen.sum())
        return [
            LayoutRows(
                splits=taken.splits,
                case=costs.case[chosen],
                schedule=taken.schedule,
                chunks=taken.chunks,
                zero=np.full(count, sharding.zero, dtype=np.int64),
                shard=sharding.shard,
                least_shard=sharding.least,
                every=np.full(count, REDUCE_EVERY.index(sharding.every), dtype=np.int64),
                seconds=seconds[chosen],
            )
        ]
