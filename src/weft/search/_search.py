"""The best plans of a model on a cluster: enumerate, bound, estimate, price, refine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.cluster import Cluster
from weft.errors import PlanError
from weft.plan import AXES, MOMENTS, Plan
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
from weft.search._group import GroupCosts, blocks_seconds, group_costs
from weft.search._objective import Objective
from weft.search._pins import with_given
from weft.search._result import Candidate, Counts, SearchResult
from weft.search._rows import Rows, join
from weft.search._screen import Screen
from weft.search._space import Space, space_of, without_offload
from weft.search._splits import Ints, Splits, enumerate_splits
from weft.search._unequal import Balancer, kinds_of, speed_of

_PER_FAMILY = 5
"""Plans with the same axes and ZeRO stage of which the best estimates are priced, where not all are."""
_PLAYED_PER_FAMILY = 3
_PLAYED_ACTIONS = 250_000
"""Actions of schedules that are played at least, before the rest of the finalists keep their closed forms."""
_CLOSE = 1.03
"""Estimates this much above the last one that is kept are kept too: they may be priced better."""


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
    finalists: int = 160,
    pricer: Pricer | None = None,
    given: Plan | None = None,
) -> SearchResult:
    """Return the best plans for a model on a cluster.  Deterministic; needs no torch and no devices.

    Every combination in `space` is looked at: dropped by a bound that no pricing goes below, or estimated; the best
    `finalists` estimates are priced, and the best `top` of those refined in their lesser settings and played action by
    action, as well as up to as many that are then as good.

    Args:
        global_batch_size: samples per step; kept exactly.
        permit: what may be done to the numerics; None: bf16 on accelerators, fp32 on cores.
        objective: what to be best at; by default throughput.
        space: what to choose among; by default everything (`space_of`).
        runnable_only: only what the engine can run today.
        optimizer: sets the bytes of optimizer state; by default AdamW.
        top: how many plans to return.
        finalists: how many estimates are priced.
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
    if not cluster.has_accelerators:
        space = without_offload(space)
    if objective.quantity == "cost":
        space = replace(space, fewer_devices=True)
    hunt = _Hunt(
        pricer=pricer or Pricer(profile, cluster, stack, calibration),
        space=space,
        objective=objective,
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        finalists=finalists,
    )
    found, counts = hunt.run(top)
    finish = _Finish(hunt, given)
    return SearchResult(
        profile=profile,
        cluster=cluster,
        global_batch_size=global_batch_size,
        objective=objective,
        space=space,
        stack=hunt.pricer.stack,
        calibration=hunt.pricer.calibration,
        best=tuple(sorted((finish.candidate(each) for each in found), key=lambda each: each.score)),
        counts=counts,
    )


class _Pool(NamedTuple):
    """Rows of one precision with the costs that they refer to."""

    rows: Rows
    base: Layout


@dataclass(slots=True, kw_only=True)
class _Hunt:
    pricer: Pricer
    space: Space
    objective: Objective
    global_batch_size: int
    optimizer: OptimizerRecipe | None
    finalists: int
    searched: int = 0
    estimated: int = 0
    time_bound: int = 0
    memory_bound: int = 0

    def run(self, top: int) -> tuple[list[Priced], Counts]:
        splits, dropped = enumerate_splits(
            self.space, devices=self.pricer.cluster.num_devices, global_batch_size=self.global_batch_size
        )
        pools = [self._pool(splits, self._base(precision)) for precision in self.space.precisions]
        finalists = Finalists(self.pricer, self.space, self.objective)
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
        copies = MOMENTS[optimizer.name] + mixed + (optimizer.average_decay is not None)
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

    def _pool(self, splits: Splits, base: Layout) -> _Pool | None:
        """The rows with the best estimates, twice as many as will be priced."""
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
        screen, limit = Screen(self.pricer, self.space), np.inf
        kept: list[Rows] = []
        for group, rows in enumerate(_groups(splits, bounds)):
            rows = rows[bounds[rows] < limit]
            if not len(rows):
                continue
            here, base_here = splits.take(rows), self._group_base(splits.take(rows), base)
            # What the group's blocks take is a closer bound than that of their FLOPs.
            whole = blocks_seconds(self.pricer, base_here)
            near = self._weighed(whole * here.microbatches / here.pipeline, here.world) < limit
            self.time_bound += int((~near).sum())
            if not near.any():
                continue
            costs = group_costs(self.pricer, self.space, base_here)
            found, count = self._screened(screen, group, costs, here.take(near), limit)
            self.searched += count
            kept += found
            kept, limit = self._best(kept, limit)
        self.time_bound += int((bounds >= limit).sum())
        return _Pool(join(kept), base) if kept else None

    def _screened(
        self, screen: Screen, group: int, costs: GroupCosts, splits: Splits, limit: float
    ) -> tuple[list[Rows], int]:
        by_devices = self.objective.quantity == "cost"
        found, count, _ = screen.rows(group, costs, splits, np.inf if by_devices else limit)
        self.estimated += sum(len(table) for table in found)
        return found, count

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
        """What rows are compared by."""
        return seconds * world if self.objective.quantity == "cost" else seconds

    def _best(self, kept: list[Rows], limit: float) -> tuple[list[Rows], float]:
        """Keep the best rows, and return what later ones must be below."""
        wanted = self.finalists
        if sum(len(table) for table in kept) < 2 * wanted:
            return kept, limit
        table = join(kept)
        weighed = self._weighed(table.seconds, table.splits.world)
        last = float(np.partition(weighed, wanted - 1)[wanted - 1]) * _CLOSE
        order = np.flatnonzero(weighed <= last)
        if len(order) > 8 * wanted:
            order = order[np.argsort(weighed[order], kind="stable")[: 8 * wanted]]
        return [table.take(order)], min(limit, last)

    # ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _price(self, finalists: Finalists, pools: Sequence[_Pool], top: int) -> list[Priced]:
        ordered: list[tuple[float, int, int]] = []
        for number, pool in enumerate(pools):
            weighed = self._weighed(pool.rows.seconds, pool.rows.splits.world)
            ordered += [(float(score), number, row) for row, score in enumerate(weighed)]
        priced: list[Priced] = []
        taken: Counter[Family] = Counter()
        for _, number, row in sorted(ordered):
            if len(priced) >= self.finalists:
                break
            layout, level = pools[number].rows.layout(row, pools[number].base, self.space)
            family = family_of(layout)
            if taken[family] >= _PER_FAMILY and len(ordered) > self.finalists:
                continue
            taken[family] += 1
            found = finalists.price(layout, level)
            if found is not None:
                priced.append(found)
        refined = [finalists.refine(leader) for leader in _leaders(priced)[:top]]
        unique = {each.layout: each for each in (*priced, *refined)}
        return _leaders(self._played(finalists, list(unique.values()), top))[:top]

    def _played(self, finalists: Finalists, priced: list[Priced], top: int) -> list[Priced]:
        """Play all, where that is little work; else the best until `top` families and enough of each are played."""
        work = sum(actions_of(each.layout) for each in priced)
        played: list[Priced] = []
        spent, of_family = 0, Counter[Family]()
        for each in sorted(priced, key=_rank):
            family = family_of(each.layout)
            if work > _PLAYED_ACTIONS:
                if spent > _PLAYED_ACTIONS and len(of_family) >= top:
                    break
                most = 1 if spent > _PLAYED_ACTIONS else _PLAYED_PER_FAMILY
                if of_family[family] >= most or (len(of_family) >= top and family not in of_family):
                    continue
            of_family[family] += 1
            spent += actions_of(each.layout)
            played.append(finalists.played(each))
        return played


def actions_of(layout: Layout) -> int:
    """How many actions of a pipeline are played to price a layout exactly: at most three rounds of its ranks."""
    if layout.pipeline == 1:
        return 1
    return 3 * layout.num_stages * min(layout.microbatches, 4 * layout.pipeline)


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
    words = (layout.schedule, str(layout.recompute), layout.reduce_every)
    return (priced.score, *axes, layout.microbatch_size, *words, layout.order)


def _groups(splits: Splits, bounds: Floats) -> list[Ints]:
    """Rows that share microbatch and tensor, context and expert axes; the group with the lowest bound first."""
    if not len(splits):
        return []
    key = splits.tensor
    for column in (splits.context, splits.expert, splits.size):
        key = key * (int(column.max()) + 1) + column
    _, inverse = np.unique(key, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.flatnonzero(np.diff(inverse[order])) + 1
    groups = np.split(order, edges)
    return sorted(groups, key=lambda rows: float(bounds[rows].min()))


class _Finish:
    """Turns priced layouts into candidates."""

    def __init__(self, hunt: _Hunt, given: Plan | None) -> None:
        self._hunt, self._given = hunt, given or Plan()
        self._sample_flops = model_flops(hunt.pricer.profile)
        cluster = hunt.pricer.cluster
        self._balancer = Balancer(hunt.pricer) if len(kinds_of(cluster)) > 1 else None

    def candidate(self, priced: Priced) -> Candidate:
        """Return a layout with its plan and all that is said of it; its data ranks balanced over unequal devices."""
        hunt, layout, shares = self._hunt, priced.layout, None
        balanced = self._balancer.balance(layout, hunt.global_batch_size) if self._balancer is not None else None
        if balanced is None:
            prediction = hunt.pricer.predict(layout, exact=True)
        else:
            layout, shares, prediction = balanced.layout, balanced.shares, balanced.prediction
        objective, step = hunt.objective, prediction.step_seconds
        tokens = hunt.global_batch_size * hunt.pricer.profile.sequence_length
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
        cluster, pricer = self._hunt.pricer.cluster, self._hunt.pricer
        speed = pricer.device(layout).peak(layout.precision)
        if self._balancer is not None:
            speeds = [(node.count * node.devices.count, speed_of(node.devices)) for node in cluster.nodes]
            speed *= sum(count * each for count, each in speeds) / cluster.num_devices / min(each for _, each in speeds)
        flops = self._sample_flops * self._hunt.global_batch_size
        return flops / (layout.world_size * speed * step_seconds)

    def _plan(self, layout: Layout, shares: tuple[int, ...] | None) -> Plan | None:
        batch, pricer = self._hunt.global_batch_size, self._hunt.pricer
        if layout.pipeline > 1:
            layout = replace(layout, cuts=pricer.whole(layout).cuts(layout))  # the ones that were priced
        try:
            plan = plan_of(layout, global_batch_size=batch, shares=shares)
        except PlanError:
            return None
        return with_given(plan, self._given)
