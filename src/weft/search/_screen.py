"""All layouts of a group of splits, estimated; those that may fit and may be among the best."""

from __future__ import annotations

import numpy as np

from weft.plan import Recompute
from weft.price import Pricer
from weft.search._bounds import Floats
from weft.search._estimate import Estimates, pipeline_seconds
from weft.search._group import GroupCosts
from weft.search._options import Choices, Options, Way, ways_of_sharding
from weft.search._rows import REDUCE_EVERY, Level, Rows, levels_of
from weft.search._space import Space
from weft.search._splits import Bools, Ints, Splits

_MIXED_SHARE = 0.6
"""Of what the first stage must compute again, the mean over the stages: later ones hold fewer microbatches."""


class Screen:
    """Screens groups of splits of one model on one cluster."""

    def __init__(self, pricer: Pricer, space: Space) -> None:
        self._pricer, self._space = pricer, space
        self._levels = levels_of(space)
        self._usable = pricer.cluster.usable_memory_bytes
        self._choices = Choices(space, len(pricer.profile.blocks))

    def rows(self, group: int, costs: GroupCosts, splits: Splits, limit: float) -> tuple[list[Rows], int, int]:
        """Return the layouts of a group that may fit and take less than `limit` seconds; how many there are in all; and
        how many of those cannot fit.

        More recomputation or offloading than fits makes no step shorter, so only the least that fits is returned.
        """
        options = self._choices.options(splits)
        whole = len(options) * len(self._levels) * len(self._space.offloads)
        schedules, blocks = self._space.schedules, len(self._pricer.profile.blocks)
        fastest = pipeline_seconds(schedules, blocks, costs.hop, options, costs.passes[self._levels[0].light], 0.0)
        options = options.take(fastest < limit)
        choices = ways_of_sharding(self._space, options)
        found: list[Rows] = []
        unfit = 0
        for way in choices:
            valid = way.shard > 0
            if valid.any():
                way = way._replace(shard=way.shard[valid])
                rows, too_large = self._sharded(group, costs, options.take(valid), way, limit)
                found += rows
                unfit += too_large
        return found, whole * len(choices), unfit

    def _sharded(
        self, group: int, costs: GroupCosts, options: Options, way: Way, limit: float
    ) -> tuple[list[Rows], int]:
        """Rows under one way of sharding, and how many do not fit whatever is computed again or offloaded."""
        first = self._levels[0].light
        estimates = Estimates(self._pricer, self._space.schedules, costs, options, way)
        # More recomputation and offloading make a step longer, so what is too slow without stays so.
        seconds = estimates.seconds(costs.passes[first], costs.held[first], "none")
        near = seconds < limit
        if not near.any():
            return [], 0
        options, way = options.take(near), way._replace(shard=way.shard[near])
        estimates = Estimates(self._pricer, self._space.schedules, costs, options, way, estimates.rates)
        found: list[Rows] = []
        fitting = np.zeros(len(options), dtype=bool)
        needs: dict[Recompute, Floats] = {}
        for place, level in enumerate(self._levels):
            if level.is_mixed:
                if level.light in needs and level.heavy in needs:
                    seconds, fits = self._mixed(estimates, costs, needs, level)
                    found += self._table(group, options, fits & (seconds < limit), way, (place, 0), seconds)
            elif not fitting.all():
                found += self._plain(group, costs, estimates, (options, way), place, fitting, needs, limit)
        return found, int((~fitting).sum())

    def _plain(
        self,
        group: int,
        costs: GroupCosts,
        estimates: Estimates,
        rows: tuple[Options, Way],
        place: int,
        fitting: Bools,
        needs: dict[Recompute, Floats],
        limit: float,
    ) -> list[Rows]:
        """Rows with all blocks alike; marks in `fitting` those that fit without offloading, and notes their needs."""
        options, way = rows
        word = self._levels[place].light
        found: list[Rows] = []
        done = fitting.copy()
        for offload, name in enumerate(self._space.offloads):
            if done.all():
                break
            need = estimates.device_bytes(costs.held[word], name)
            fits = (need <= self._usable) & ~done
            if name == "none":
                needs[word] = need
                fitting |= fits
                done = fitting.copy()
            if fits.any():
                seconds = estimates.seconds(costs.passes[word], costs.held[word], name)
                found += self._table(group, options, fits & (seconds < limit), way, (place, offload), seconds)
        return found

    def _mixed(
        self, estimates: Estimates, costs: GroupCosts, needs: dict[Recompute, Floats], level: Level
    ) -> tuple[Floats, Bools]:
        """Seconds when only as many blocks are computed again as needed, and where that is of use."""
        light, heavy = level
        saved = estimates.saved_bytes(costs.held[light], costs.held[heavy])
        over = needs[light] - self._usable
        share = np.clip(over / np.maximum(saved, 1.0), 0.0, 1.0) * _MIXED_SHARE
        seconds = estimates.seconds(costs.passes[light], costs.held[light], "none")
        most = estimates.seconds(costs.passes[heavy], costs.held[heavy], "none")
        seconds = seconds + share * (most - seconds)
        return seconds, (needs[light] > self._usable) & (needs[heavy] <= self._usable)

    def _table(
        self,
        group: int,
        options: Options,
        chosen: Bools,
        way: Way,
        place: tuple[int, int],
        seconds: Floats,
    ) -> list[Rows]:
        if not chosen.any():
            return []
        taken, count = options.take(chosen), int(chosen.sum())

        def same(value: int) -> Ints:
            return np.full(count, value, dtype=np.int64)

        return [
            Rows(
                splits=taken.splits,
                group=same(group),
                schedule=taken.schedule,
                chunks=taken.chunks,
                zero=same(way.zero),
                shard=way.shard[chosen],
                every=same(REDUCE_EVERY.index(way.every)),
                level=same(place[0]),
                offload=same(place[1]),
                seconds=seconds[chosen],
            )
        ]
