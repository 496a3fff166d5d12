"""All layouts of a group of splits, estimated; those that may fit and may be among the best."""

from __future__ import annotations

import numpy as np

from weft.plan import Recompute
from weft.price import Pricer
from weft.search._bounds import Floats
from weft.search._estimate import Estimates, pipeline_seconds
from weft.search._group import GroupCosts
from weft.search._options import Choices, Options, shardings
from weft.search._rows import Level, Rows, levels_of
from weft.search._space import Space
from weft.search._splits import Bools, Ints, Splits


class Screen:
    """Screens groups of splits of one model on one cluster."""

    def __init__(self, pricer: Pricer, space: Space) -> None:
        self._pricer, self._space = pricer, space
        self._levels = levels_of(space)
        self._usable = float(pricer.cluster.device_memory_bytes)
        self._choices = Choices(space, len(pricer.profile.blocks))

    def rows(self, group: int, costs: GroupCosts, splits: Splits, limit: Floats) -> tuple[list[Rows], int]:
        """Return the layouts of a group that may fit and take less than `limit` seconds (of each split), with the least
        that each may take; and how many there are in all."""
        splits, limit = splits.take(limit > 0), limit[limit > 0]
        options, row = self._choices.options(splits)
        limit = limit[row]
        whole = len(options) * len(self._levels) * len(self._space.offloads)
        schedules, blocks = self._space.schedules, len(self._pricer.profile.blocks)
        fastest = pipeline_seconds(schedules, blocks, costs.hop, options, costs.passes[self._levels[0].light], 0.0)
        near = fastest < limit
        options, limit = options.take(near), limit[near]
        choices = shardings(self._space, options.splits)
        found: list[Rows] = []
        for zero, shard in choices:
            valid = shard > 0
            if valid.any():
                found += self._sharded(group, costs, options.take(valid), zero, shard[valid], limit[valid])
        return found, whole * len(choices)

    def _sharded(
        self, group: int, costs: GroupCosts, options: Options, zero: int, shard: Ints, limit: Floats
    ) -> list[Rows]:
        """Rows under one way of sharding."""
        first = self._levels[0].light
        estimates = Estimates(self._pricer, self._space.schedules, costs, options, zero, shard)
        # More recomputation and offloading make a step longer, so what is too slow without stays so.
        near = estimates.seconds(costs.passes[first], costs.held[first], "none") < limit
        if not near.any():
            return []
        options, shard, limit = options.take(near), shard[near], limit[near]
        estimates = Estimates(self._pricer, self._space.schedules, costs, options, zero, shard, estimates.rates)
        least = self._least(estimates, costs, len(options))
        return self._table(group, options, least < limit, zero, shard, least)

    def _least(self, estimates: Estimates, costs: GroupCosts, count: int) -> Floats:
        """The least seconds with what must be computed again or offloaded to fit; infinite where nothing fits."""
        least = np.full(count, np.inf)
        needs: dict[Recompute, Floats] = {}
        for level in self._levels:
            light, heavy = level
            if level.is_mixed:
                if light in needs and heavy in needs:
                    least = np.minimum(least, self._mixed(estimates, costs, needs, level))
                continue
            if np.isfinite(least).all():
                break  # a heavier level takes longer
            for offload in self._space.offloads:
                need = estimates.device_bytes(costs.held[light], offload)
                if offload == "none":
                    needs[light] = need
                seconds = estimates.seconds(costs.passes[light], costs.held[light], offload)
                least = np.minimum(least, np.where(need <= self._usable, seconds, np.inf))
        return least

    def _mixed(self, estimates: Estimates, costs: GroupCosts, needs: dict[Recompute, Floats], level: Level) -> Floats:
        """Seconds when only as many blocks are computed again as needed; infinite where that is of no use."""
        light, heavy = level
        share = estimates.least_share(costs.held[light], costs.held[heavy], needs[light], self._usable)
        seconds = estimates.seconds(costs.passes[light], costs.held[light], "none")
        most = estimates.seconds(costs.passes[heavy], costs.held[heavy], "none")
        useful = (needs[light] > self._usable) & (needs[heavy] <= self._usable)
        return np.where(useful, seconds + share * (most - seconds), np.inf)

    def _table(
        self, group: int, options: Options, chosen: Bools, zero: int, shard: Ints, seconds: Floats
    ) -> list[Rows]:
        if not chosen.any():
            return []
        taken, count = options.take(chosen), int(chosen.sum())
        return [
            Rows(
                splits=taken.splits,
                group=np.full(count, group, dtype=np.int64),
                schedule=taken.schedule,
                chunks=taken.chunks,
                zero=np.full(count, zero, dtype=np.int64),
                shard=shard[chosen],
                seconds=seconds[chosen],
            )
        ]
