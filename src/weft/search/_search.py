"""The best plans of a model on a cluster: enumerate, bound, estimate, price, refine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from weft.cluster import Cluster
from weft.errors import PlanError
from weft.plan import AXES, Plan
from weft.price import (
    FIRST_BUCKET_BYTES,
    FITTED,
    WEFT,
    Calibration,
    Layout,
    PricedPrecision,
    Pricer,
    Stack,
    model_flops,
)
from weft.profile import Profile
from weft.recipe import OptimizerRecipe, PermitRecipe
from weft.search._bounds import Floats, figures_of, memory_bounds, time_bounds
from weft.search._buckets import USUAL_BUCKET_BYTES
from weft.search._convert import plan_of
from weft.search._finalists import Finalists, Priced
from weft.search._group import blocks_seconds, group_costs
from weft.search._neighbours import neighbours
from weft.search._objective import Objective
from weft.search._pins import with_given
from weft.search._result import Candidate, Counts, SearchResult
from weft.search._rows import Rows, join
from weft.search._screen import Screen
from weft.search._space import Space, space_of
from weft.search._splits import Ints, Splits, enumerate_splits
from weft.search._unequal import Balancer, kinds_of, speed_of

_MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1, "adafactor": 0}
_ALTERNATIVES = 1.15
"""Times the best score so far up to which estimates are kept."""
_CLOSE = 1.0
"""Times the best score so far up to which the best estimates of pairs of values are priced."""
_COMPARED = 1.5
"""Times the best score up to which other kinds of plans are priced for a comparison."""
_WORTH = 0.9
"""Times the best score so far below which the best estimate of a group is priced at once."""
_CLIMBS = 3
"""Best plans of different kinds from which the search climbs to neighbours."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    permit: PermitRecipe | None = None,
    objective: Objective | None = None,
    space: Space | None = None,
    runnable_only: bool = False,
    optimizer: OptimizerRecipe | None = None,
    stack: Stack = WEFT,
    calibration: Calibration = FITTED,
    top: int = 5,
    pricer: Pricer | None = None,
    given: Plan | None = None,
) -> SearchResult:
    """Return the best plans for a model on a cluster.  Deterministic; needs no torch and no devices.

    Every combination in `space` is looked at: dropped by a bound that no pricing goes below, or estimated; the best
    estimate of every pair of values is priced, played action by action where it may be best, and from the best prices
    the search climbs to their neighbours.

    Args:
        global_batch_size: samples per step; kept exactly.
        permit: what may be done to the numerics; None: bf16 on accelerators, fp32 on cores.
        objective: what to be best at; by default throughput.
        space: what to choose among; by default everything (`space_of`).
        runnable_only: only what the engine can run today.
        optimizer: sets the bytes of optimizer state; by default AdamW.
        top: how many plans to return.
        pricer: one to share parts of prices with other searches of the same model, cluster, stack and calibration.
        given: settings that search does not choose (`beyond_search`: threads, the rank of a codec, local steps), as its
            `origins` name them; they stand in the plans, and prices know nothing of them.

    Raises:
        PlanError: impossible arguments.  That nothing fits is no error: `best` is then empty.
    """
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size = {global_batch_size} must be at least 1.")
    objective = objective or Objective()
    space = space or space_of(
        profile, cluster, global_batch_size=global_batch_size, permit=permit, runnable_only=runnable_only
    )
    if objective.quantity == "cost":
        space = replace(space, fewer_devices=True)
    state = SearchState(
        pricer=pricer or Pricer(profile, cluster, stack, calibration),
        space=space,
        objective=objective,
        global_batch_size=global_batch_size,
        optimizer=optimizer,
    )
    found, counts = state.run(top)
    finish = _Finish(state, given)
    return SearchResult(
        profile=profile,
        cluster=cluster,
        global_batch_size=global_batch_size,
        objective=objective,
        space=space,
        stack=state.pricer.stack,
        calibration=state.pricer.calibration,
        best=tuple(sorted((finish.candidate(each) for each in found), key=lambda each: each.score)),
        counts=counts,
    )


class _Pool(NamedTuple):
    """Rows of one precision with the costs that they refer to."""

    rows: Rows
    base: Layout


@dataclass(slots=True, kw_only=True)
class SearchState:
    pricer: Pricer
    space: Space
    objective: Objective
    global_batch_size: int
    optimizer: OptimizerRecipe | None
    searched: int = 0
    estimated: int = 0
    time_bound: int = 0
    memory_bound: int = 0

    def run(self, top: int) -> tuple[list[Priced], Counts]:
        splits, dropped = enumerate_splits(
            self.space, devices=self.pricer.cluster.num_devices, global_batch_size=self.global_batch_size
        )
        finalists = Finalists(self.pricer, self.space, self.objective)
        pools = [self._pool(finalists, splits, self._base(precision)) for precision in self.space.precisions]
        found = self._price(finalists, [pool for pool in pools if pool is not None], top)
        counts = Counts(
            searched=self.searched,
            invalid={"devices": dropped.devices, "batch": dropped.batch, "experts": dropped.experts},
            memory_bound=self.memory_bound,
            time_bound=self.time_bound,
            estimated=self.estimated,
            priced=finalists.tally.priced,
            out_of_memory=finalists.tally.out_of_memory,
        )
        return found, counts

    def _base(self, precision: PricedPrecision) -> Layout:
        """What all layouts of a precision share."""
        mixed = precision not in ("fp32", "tf32", "fp64")
        element = 8 if precision == "fp64" else 4
        optimizer = self.optimizer or OptimizerRecipe()
        copies = _MOMENTS[optimizer.name] + mixed + (optimizer.average_decay is not None)
        return Layout(
            precision=precision,
            gradient_bytes=element,
            master_bytes=copies * element,
            fused_loss=self.space.fused_losses[0],
            bucket_bytes=(self.space.bucket_bytes or (USUAL_BUCKET_BYTES,))[0],
            first_bucket_bytes=(self.space.first_bucket_bytes or (FIRST_BUCKET_BYTES,))[0],
            compression=self.space.compressions[0],
            algorithm=self.space.algorithms[0],
            tensor_scheme=self.space.tensor_schemes[0],
            context_scheme=self.space.context_schemes[0],
            sequence_parallel=True in self.space.sequence_parallels,
            order=AXES if self.space.orders is None else self.space.orders[0],
        )

    # ── bounds and estimates ──────────────────────────────────────────────────────────────────────────────────────

    def _pool(self, finalists: Finalists, splits: Splits, base: Layout) -> _Pool | None:
        """The rows that may score less than the best price, or little more.

        Of every group the row with the least estimate is priced at once, so that later groups meet a limit.
        """
        figures = figures_of(self.pricer.profile, self.pricer.cluster, self.space, self.pricer, base)
        least = memory_bounds(
            figures,
            splits,
            zero=max(self.space.zeros),
            master_bytes=base.master_bytes,
            offload="optimizer" in self.space.offloads,
        )
        fits = least <= figures.usable_bytes
        self.memory_bound += int((~fits).sum())
        splits = splits.take(fits)
        bounds = self._weighed(time_bounds(figures, splits), splits.world)
        screen, kept = Screen(self.pricer, self.space), list[Rows]()
        for group, rows in enumerate(_groups(splits, bounds, self._ranks_of_nodes(splits))):
            limit = finalists.best * _ALTERNATIVES
            near = rows[bounds[rows] < limit]
            self.time_bound += len(rows) - len(near)
            found = self._group_rows(screen, group, splits.take(near), base, limit) if len(near) else []
            for table in found:
                weighed = self._weighed(table.seconds, table.splits.world)
                row = int(np.argmin(weighed))
                if weighed[row] < finalists.best * _WORTH:
                    finalists.seed(table.layout(row, base, self.space))
            kept += found
        return _Pool(join(kept), base) if kept else None

    def _group_rows(self, screen: Screen, group: int, splits: Splits, base: Layout, limit: float) -> list[Rows]:
        base_here = self._group_base(splits, base)
        # What the group's blocks take is a closer bound than that of their FLOPs.
        whole = blocks_seconds(self.pricer, base_here)
        per_second = self._weighed(np.ones(len(splits)), splits.world)
        near = whole * splits.microbatches / splits.pipeline * per_second < limit
        self.time_bound += int((~near).sum())
        if not near.any():
            return []
        splits, per_second = splits.take(near), per_second[near]
        costs = group_costs(self.pricer, self.space, base_here)
        found, count = screen.rows(group, costs, splits, limit / per_second)
        self.searched += count
        self.estimated += sum(len(table) for table in found)
        return found

    def _ranks_of_nodes(self, splits: Splits) -> Ints:
        """Ranks that share a node's cores: what each computes with depends on them."""
        cluster = self.pricer.cluster
        return np.ones_like(splits.world) if cluster.has_accelerators else -(-splits.world // cluster.num_nodes)

    def _group_base(self, splits: Splits, base: Layout) -> Layout:
        """One layout of a group, for what all of them have in common."""
        row = int(np.argmax(splits.pipeline > 1))
        tensor = int(splits.tensor[row])
        return replace(
            base,
            pipeline=int(splits.pipeline[row]),
            tensor=tensor,
            context=int(splits.context[row]),
            expert=int(splits.expert[row]),
            shard=int(splits.data[row]),
            microbatch_size=int(splits.size[row]),
            sequence_parallel=base.sequence_parallel and tensor > 1,
        )

    def _weighed(self, seconds: Floats, world: Ints) -> Floats:
        """Scores of steps of so many seconds."""
        seconds = seconds * self.objective.pessimistic_seconds(1.0, self.pricer.stack.spread)
        return seconds * world if self.objective.quantity == "cost" else seconds

    # ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _price(self, finalists: Finalists, pools: Sequence[_Pool], top: int) -> list[Priced]:
        """Price the best estimates of every pair of values of two settings, climb from the best prices to their
        neighbours, and price some plans of other kinds."""
        seeds = _seeds(pools, self._weighed)
        for number, row, estimate in seeds:
            if estimate < finalists.best * _CLOSE:
                finalists.seed(pools[number].rows.layout(row, pools[number].base, self.space))
        climbed: set[Layout] = set()
        while True:
            leaders = _leaders(list(finalists.found.values()))[:_CLIMBS]
            fresh = [each.layout for each in leaders if each.layout not in climbed]
            if not fresh:
                break
            climbed |= set(fresh)
            for layout in fresh:
                self._climb(finalists, layout)
        families = {family_of(layout) for layout in finalists.found}
        for number, row, _ in seeds:  # other kinds of plans, for a comparison
            layout = pools[number].rows.layout(row, pools[number].base, self.space)
            if len(families) < top and family_of(layout) not in families:
                finalists.seed(layout, limit=finalists.best * _COMPARED)
                families = {family_of(layout) for layout in finalists.found}
        return _leaders(list(finalists.found.values()))[:top]

    def _climb(self, finalists: Finalists, start: Layout) -> None:
        """Price all neighbours of a layout: one setting changed, or ranks moved from one axis to another."""
        for layout in neighbours(start, self.space, self.pricer, self.global_batch_size):
            has_same_axes = family_of(layout) == family_of(start) and layout.microbatch_size == start.microbatch_size
            finalists.seed(layout, quick=not has_same_axes)
        finalists.explore(start, finalists.best)


def _seeds(pools: Sequence[_Pool], weighed: Callable[[Floats, Ints], Floats]) -> list[tuple[int, int, float]]:
    """Return (pool, row, estimate) of the best estimate of every pair of values of two settings, the best first."""
    found: list[tuple[float, int, int]] = []
    for number, pool in enumerate(pools):
        estimates = weighed(pool.rows.seconds, pool.rows.splits.world)
        order = np.argsort(estimates, kind="stable")
        columns = [np.unique(column[order], return_inverse=True)[1] for column in pool.rows.settings()]
        firsts = [
            np.unique(one * (int(other.max()) + 1) + other, return_index=True)[1]
            for one, other in combinations(columns, 2)
        ]
        rows = order[np.unique(np.concatenate(firsts))]
        found += [(float(estimates[row]), number, int(row)) for row in rows]
    return [(number, row, estimate) for estimate, number, row in sorted(found)]


Family = tuple[int, ...]


def family_of(layout: Layout) -> Family:
    """What makes two plans different kinds of plans: the axes, and the ZeRO stage."""
    return layout.pipeline, layout.data, layout.context, layout.tensor, layout.expert, layout.zero


def _leaders(priced: Sequence[Priced]) -> list[Priced]:
    """The best of each family, best first."""
    found: dict[Family, Priced] = {}
    for each in sorted(priced, key=_rank):
        found.setdefault(family_of(each.layout), each)
    return list(found.values())


def _rank(priced: Priced) -> tuple[object, ...]:
    """Lower scores first; of equals, the simpler layout."""
    layout = priced.layout
    axes = (layout.pipeline, layout.tensor, layout.context, layout.expert, layout.chunks, layout.zero, layout.shard)
    return (priced.score, *axes, layout.microbatch_size, layout.schedule, str(layout.recompute), layout.order)


def _groups(splits: Splits, bounds: Floats, ranks: Ints) -> list[Ints]:
    """Rows that share microbatch, tensor, context, expert axes and `ranks`; the group with the lowest bound first."""
    if not len(splits):
        return []
    key = splits.tensor
    for column in (splits.context, splits.expert, splits.size, ranks):
        key = key * (int(column.max()) + 1) + column
    _, inverse = np.unique(key, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.flatnonzero(np.diff(inverse[order])) + 1
    groups = np.split(order, edges)
    return sorted(groups, key=lambda rows: float(bounds[rows].min()))


class _Finish:
    """Turns priced layouts into candidates."""

    def __init__(self, state: SearchState, given: Plan | None) -> None:
        self._state, self._given = state, given or Plan()
        self._sample_flops = model_flops(state.pricer.profile)
        cluster = state.pricer.cluster
        self._balancer = Balancer(state.pricer) if len(kinds_of(cluster)) > 1 else None

    def candidate(self, priced: Priced) -> Candidate:
        """Return a layout with its plan and all that is said of it; its data ranks balanced over unequal devices."""
        state, layout, shares = self._state, priced.layout, None
        balanced = self._balancer.balance(layout, state.global_batch_size) if self._balancer is not None else None
        if balanced is None:
            prediction = state.pricer.predict(layout, exact=True)
        else:
            layout, shares, prediction = balanced.layout, balanced.shares, balanced.prediction
        objective, step = state.objective, prediction.step_seconds
        tokens = state.global_batch_size * state.pricer.profile.sequence_length
        pessimistic = objective.pessimistic_seconds(step, prediction.spread)
        has_price = objective.price_per_device_hour is not None
        cost = objective.cost_per_million_tokens(step, layout.world_size, tokens) if has_price else None
        return Candidate(
            layout=layout,
            prediction=prediction,
            plan=self._plan(layout, shares),
            score=objective.score(pessimistic, layout.world_size),
            pessimistic_seconds=pessimistic,
            tokens_per_second=tokens / step,
            model_flops_utilization=self._utilization(layout, step),
            cost_per_million_tokens=cost,
            training_seconds=objective.training_seconds(pessimistic, tokens),
        )

    def _utilization(self, layout: Layout, step_seconds: float) -> float:
        """Of the used devices; where devices are unequal, of as many mean ones."""
        cluster, pricer = self._state.pricer.cluster, self._state.pricer
        speed = pricer.device(layout).peak(layout.precision)
        if self._balancer is not None:
            speeds = [(node.count * node.devices.count, speed_of(node.devices)) for node in cluster.nodes]
            speed *= sum(count * each for count, each in speeds) / cluster.num_devices / min(each for _, each in speeds)
        flops = self._sample_flops * self._state.global_batch_size
        return flops / (layout.world_size * speed * step_seconds)

    def _plan(self, layout: Layout, shares: tuple[int, ...] | None) -> Plan | None:
        batch, pricer = self._state.global_batch_size, self._state.pricer
        if layout.pipeline > 1:
            layout = replace(layout, cuts=pricer.whole(layout).cuts(layout))  # the ones that were priced
        try:
            plan = plan_of(layout, global_batch_size=batch, shares=shares)
        except PlanError:
            return None
        return with_given(plan, self._given)
