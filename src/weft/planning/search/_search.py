"""The best plans of a model on a cluster: everything is bounded, and priced in the order of its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from weft.config.cluster import Cluster
from weft.config.plan import AXES, Axis, Plan
from weft.config.recipe import OptimizerRecipe, PermitRecipe
from weft.errors import PlanError
from weft.model.profile import Block, Profile
from weft.planning.price import CostModel
from weft.planning.search._acceptance import Acceptance
from weft.planning.search._bounds import Floats, SplitBounds
from weft.planning.search._buckets import USUAL_BUCKET_BYTES, PricedLayout
from weft.planning.search._finalists import Finalists
from weft.planning.search._frontier import Frontier
from weft.planning.search._group import group_costs
from weft.planning.search._objective import Objective
from weft.planning.search._result import Candidate, Counts, SearchResult, candidate_of
from weft.planning.search._rows import LayoutRows
from weft.planning.search._screen import Screen
from weft.planning.search._space import Space, space_of, without_offload
from weft.planning.search._splits import Bools, Ints, Splits, enumerate_splits
from weft.planning.search._unequal import Balancer, kinds_of, speed_of
from weft.planning.search._variants import StageVariant, arrangements, variants
from weft.techniques.buckets.settings import FIRST_BUCKET_BYTES
from weft.techniques.cost_terms import FITTED, WEFT, Calibration, Framework, Layout, PricedPrecision
from weft.techniques.zero.settings import stage_of

_WINDOWS = (1.25, 2.0, math.inf)
"""A window ends at this multiple of the group's bound: the first, the second and the last look at its rows."""
_COMPARED = 1.5
"""Plans of other kinds are priced for a comparison up to this multiple of the best score."""
_LOOKED_AT = 60
"""Groups and rows that a comparison looks at, at most."""
_WORTH = 0.9
"""The first row of a table is priced at once where its bound is below this share of the best score: a low price early
cuts off more of what follows."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    permit: PermitRecipe | None = None,
    objective: Objective | None = None,
    space: Space | None = None,
    optimizer: OptimizerRecipe | None = None,
    framework: Framework = WEFT,
    calibration: Calibration = FITTED,
    top: int = 5,
    cost_model: CostModel | None = None,
    pins: Plan | None = None,
) -> SearchResult:
    """Return the best plans for a model on a cluster.  Deterministic; needs no torch and no devices.

    Every combination in `space` is looked at: dropped by a bound that no price goes below, or priced in the order of
    their bounds until the next bound is above the best price.

    Args:
        global_batch_size: samples per step; kept exactly.
        permit: what may be done to the numerics; None: bf16 on accelerators, fp32 on cores.
        objective: what to be best at; by default throughput.
        space: what to choose among; by default everything (`space_of`).
        optimizer: sets the bytes of optimizer state; by default AdamW.
        top: how many plans to return.
        cost_model: one that shares parts of prices with other searches of the same model, cluster, framework and
            calibration.
        pins: settings that search does not choose (`beyond_search`: threads, the rank of a codec, local steps), as the
            plan's `origins` name them.  They are written into the plans; prices know nothing of them.

    Raises:
        PlanError: impossible arguments.  That nothing fits is no error: `best` is then empty.
    """
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size = {global_batch_size} must be at least 1.")
    objective = objective or Objective()
    space = space or space_of(profile, cluster, global_batch_size=global_batch_size, permit=permit)
    if not cluster.has_accelerators:
        space = without_offload(space)
    if objective.quantity == "cost":
        space = replace(space, fewer_devices=True)
    state = SearchState(
        cost_model=cost_model or CostModel(profile, cluster, framework, calibration),
        space=space,
        objective=objective,
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        pins=pins,
    )
    leaders, counts = state.run(top)
    finish = _Finaliser(state)
    return SearchResult(
        profile=profile,
        cluster=cluster,
        global_batch_size=global_batch_size,
        objective=objective,
        space=space,
        framework=state.cost_model.framework,
        calibration=state.cost_model.calibration,
        best=tuple(sorted((finish.candidate(priced) for priced in leaders), key=lambda candidate: candidate.score)),
        counts=counts,
    )


class _SplitGroup(NamedTuple):
    """Splits that share microbatch, tensor, context and expert axes."""

    frontier: Frontier
    screen: Screen
    splits: Splits
    score_per_second: Floats
    """Score of each split where one microbatch takes a second in all blocks."""
    seen: Bools
    """The splits whose rows have been bounded."""

    @property
    def least(self) -> float:
        return float(self.score_per_second.min())

    @property
    def most_data(self) -> int:
        """The most data ranks of a split."""
        return int(self.splits.data.max())


@dataclass(slots=True, kw_only=True)
class SearchState:
    """One search: what it is about, and what it has counted."""

    cost_model: CostModel
    space: Space
    objective: Objective
    global_batch_size: int
    optimizer: OptimizerRecipe | None
    pins: Plan | None = None
    acceptance: Acceptance = field(init=False)
    _counted: list[tuple[Block, int]] = field(init=False)
    _groups: list[_SplitGroup] = field(init=False, default_factory=list["_SplitGroup"])
    searched: int = 0
    estimated: int = 0
    memory_bound: int = 0

    def __post_init__(self) -> None:
        self._counted = self.cost_model.profile.count_blocks()
        self.acceptance = Acceptance(self.cost_model, self.space, self.global_batch_size, self.pins)

    def run(self, top: int) -> tuple[list[PricedLayout], Counts]:
        cluster = self.cost_model.cluster
        splits, dropped = enumerate_splits(
            self.space,
            devices=cluster.num_devices,
            global_batch_size=self.global_batch_size,
        )
        finalists = Finalists(self.cost_model, self.space, self.objective, self.acceptance)
        frontier = Frontier()
        # Branch and bound: a group is refined four times, each time by a bound that costs more to compute and is
        # closer: FLOPs (`_begin`), what blocks compute (`_refine`), what they send in the best arrangement
        # (`_arrange`), every row's own step (`_screen`). Only rows are priced.
        for precision in self.space.precisions:
            self._begin(frontier, splits, self._base(precision))
        # Every step pushes things whose bounds are no lower than the one taken off, and the number of groups, cases and
        # rows is finite: the frontier runs empty, or its least bound passes the best price.
        frontier.run(finalists)
        leaders = self._with_others(frontier, finalists, top)
        counts = Counts(
            searched=self.searched,
            invalid={"devices": dropped.devices, "batch": dropped.batch, "experts": dropped.experts},
            memory_bound=self.memory_bound,
            time_bound=sum(int((~group.seen).sum()) for group in self._groups),
            estimated=self.estimated,
            priced=finalists.tally.priced,
            out_of_memory=finalists.tally.out_of_memory,
            refused=dict(self.acceptance.refused.most_common()),
        )
        return leaders, counts

    def _with_others(self, frontier: Frontier, finalists: Finalists, top: int) -> list[PricedLayout]:
        """Return the best plan and plans of other kinds: the best that were priced on the way, and more where these are
        few."""
        cheap = self.objective.quantity == "cost"
        leaders = _leaders(finalists.found.values(), idle=cheap)
        if leaders and len(leaders) < top:
            finalists.compared = _COMPARED
            for _ in frontier.look(finalists, most=_LOOKED_AT):
                leaders = _leaders(finalists.found.values(), idle=cheap)
                if len(leaders) >= top:
                    break
        return leaders[:top]

    def _base(self, precision: PricedPrecision) -> Layout:
        """Return the layout that has what all layouts of a precision share."""
        mixed = precision not in ("fp32", "tf32", "fp64")
        element = 8 if precision == "fp64" else 4
        optimizer = self.optimizer or OptimizerRecipe()
        # Master weights exist beside 16-bit weights only; an average of the weights is one copy more.
        copies = optimizer.moments + mixed + (optimizer.average_decay is not None)
        profile = self.cost_model.profile
        return Layout(
            trained_share=profile.trained_share,
            coded_share=profile.coded_share,
            code_bytes=profile.code_bytes,
            precision=precision,
            gradient_bytes=element,
            master_bytes=copies * element,
            fused_loss=self.space.fused_losses[0],
            bucket_bytes=(self.space.bucket_bytes or (USUAL_BUCKET_BYTES,))[0],
            first_bucket_bytes=(self.space.first_bucket_bytes or (FIRST_BUCKET_BYTES,))[0],
            compression=self.space.compressions[0],
            algorithm=self.space.algorithms[0],
            order=AXES if self.space.orders is None else self.space.orders[0],
        )

    # ── bounds ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, frontier: Frontier, splits: Splits, base: Layout) -> None:
        """Put all groups of splits of one precision on the frontier."""
        bounds_of = SplitBounds(self.cost_model, self.space, base)
        # The lightest layout that any plan of the split can have: what does not fit even so has no plan.
        offload = "optimizer" if "optimizer" in self.space.offloads else self.space.usual_offload
        lightest = replace(base, zero=stage_of(max(self.space.zeros)), offload=offload, compression="none")
        fits = bounds_of.bytes(splits, lightest) <= self.cost_model.cluster.usable_memory_bytes
        self.memory_bound += int((~fits).sum())
        splits = splits.take(fits)
        bounds = self._weighed(bounds_of.seconds(splits), splits.world)
        screen = Screen(self.cost_model, self.space)
        self.searched += screen.count(splits)
        for rows in _groups(splits, bounds, on_cores=not self.cost_model.cluster.has_accelerators):
            here = splits.take(rows)
            score_per_second = self._weighed(here.microbatches / here.pipeline, here.world)
            group = _SplitGroup(frontier, screen, here, score_per_second, np.zeros(len(here), dtype=np.bool_))
            self._groups.append(group)
            frontier.push(float(bounds[rows].min()), partial(self._refine, group, self._group_base(here, base)))

    def _refine(self, group: _SplitGroup, base: Layout, finalists: Finalists) -> None:
        """Bound a group by what its blocks compute, which is closer than their FLOPs."""
        layouts = [*variants(self.cost_model, self.space, base)]
        alone: dict[tuple[bool, str], float] = {}
        for variant in layouts:
            # Blocks compute the same wherever their axes lie, so one arrangement of each scheme is enough for this
            # bound.
            key = (variant.sequence_parallel, variant.tensor_scheme)
            if key not in alone:
                one = next(arrangements(self.cost_model, self.space, variant, most_data=group.most_data))
                alone[key] = self.cost_model.block_sums(one.layout)[1]
        near = [(alone[variant.sequence_parallel, variant.tensor_scheme], variant) for variant in layouts]
        if not near:
            return  # the scheme splits no such axis
        # The group's score is seconds of one microbatch times `score_per_second`; the minimum of both is a bound of all
        # its splits.
        least = min(seconds for seconds, _ in near)
        group.frontier.push(least * group.least, partial(self._arrange, group, near))

    def _arrange(self, group: _SplitGroup, pairs: list[tuple[float, Layout]], finalists: Finalists) -> None:
        """Bound a group by what its blocks take with what they send, in the best arrangement of its axes."""
        cases: list[tuple[float, StageVariant]] = []
        for alone, variant in pairs:
            # Arrangements come with the fewest data ranks inside the axis first.
            slow: set[tuple[Axis, ...]] = set()
            for placed in arrangements(self.cost_model, self.space, variant, most_data=group.most_data):
                order = placed.layout.order
                if alone * group.least >= finalists.limit or order in slow:
                    continue
                whole, _ = self.cost_model.block_sums(placed.layout)
                if whole * group.least >= finalists.limit:
                    slow.add(order)  # with more data ranks inside it is no faster
                else:
                    cases.append((whole, placed))
        if cases:
            bound = min(whole for whole, _ in cases) * group.least
            group.frontier.push(bound, partial(self._screen, group, cases, bound, _WINDOWS))

    def _screen(
        self,
        group: _SplitGroup,
        cases: list[tuple[float, StageVariant]],
        bound: float,
        windows: tuple[float, ...],
        finalists: Finalists,
    ) -> None:
        """Bound the rows of a group that may score less than the best price and not much more than `bound`: the first
        of `windows` says by how much.  The others' turn comes later."""
        # Rows near the group's bound are looked at first: once one of them has a price,
        # the others may never be needed.
        above, limit = bound, finalists.limit
        if bound * windows[0] < limit:
            limit = bound * windows[0]
            group.frontier.push(limit, partial(self._screen, group, cases, limit, windows[1:]))
        cases = [case for case in cases if case[0] * group.least < limit]
        if not cases:
            return
        # Rows are only made of splits whose blocks alone take less than the limit.
        near = min(whole for whole, _ in cases) * group.score_per_second < limit
        splits = group.splits.take(near)
        costs = group_costs(self.cost_model, self.space, self._counted, [placed for _, placed in cases])
        rows = group.screen.rows(costs, splits, limit / self._weighed(np.ones(len(splits)), splits.world))
        group.seen[:] |= near
        self.estimated += sum(len(table) for table in rows)
        for table in rows:
            # The work of a rank alone also bounds a row from below.  Windows were made by that bound, so a row must not
            # fall below it, or it would belong to an earlier window.
            work = np.array([whole for whole, _ in cases])[table.case] * table.splits.microbatches
            seconds = np.maximum(table.seconds, work / table.splits.pipeline)
            weighed = self._weighed(seconds, table.splits.world)
            if windows is _WINDOWS:  # `above` bounds the whole group, and so each of its rows
                weighed = np.maximum(weighed, above)
            table, weighed = table.take(weighed >= above), weighed[weighed >= above]
            if not len(table):
                continue
            # Stable: rows of equal bounds keep their order, so that two searches choose the same plan.
            order = np.argsort(weighed, kind="stable")
            if weighed[order[0]] < finalists.limit * _WORTH:
                self._explore(table, costs.bases, int(order[0]), finalists)
            group.frontier.push_rows(weighed[order], partial(self._explore, table.take(order), costs.bases))

    def _explore(self, table: LayoutRows, bases: tuple[Layout, ...], row: int, finalists: Finalists) -> None:
        layout = table.layout(row, bases[int(table.case[row])], self.space)
        finalists.explore(layout, int(table.least_shard[row]))

    def _group_base(self, splits: Splits, base: Layout) -> Layout:
        """One layout of a group, for what all of them have in common."""
        row = int(np.argmax(splits.pipeline > 1))
        return replace(
            base,
            pipeline=int(splits.pipeline[row]),
            tensor=int(splits.tensor[row]),
            context=int(splits.context[row]),
            expert=int(splits.expert[row]),
            shard=int(splits.data[row]),
            microbatch_size=int(splits.size[row]),
        )

    def _weighed(self, seconds: Floats, world: Ints) -> Floats:
        """Scores of steps of so many seconds."""
        seconds = seconds * self.objective.pessimistic_seconds(1.0, self.cost_model.framework.spread)
        return seconds * world if self.objective.quantity == "cost" else seconds


Family = tuple[int, ...]


def family_of(layout: Layout) -> Family:
    """Return the kind of a plan: its axes, and whether weights are sharded."""
    return layout.pipeline, layout.data, layout.context, layout.tensor, layout.expert, layout.zero == 3


def _leaders(priced: Iterable[PricedLayout], *, idle: bool) -> list[PricedLayout]:
    """The best of each family, best first.  Plans on fewer devices than the best one are left out unless `idle`: nobody
    takes them instead."""
    by_family: dict[Family, PricedLayout] = {}
    for layout in sorted(priced, key=_rank):
        by_family.setdefault(family_of(layout.layout), layout)
    leaders = list(by_family.values())
    return [leader for leader in leaders if idle or leader.layout.world_size >= leaders[0].layout.world_size]


def _rank(priced: PricedLayout) -> tuple[object, ...]:
    """Lower scores first; of equals, the simpler layout."""
    layout = priced.layout
    axes = (layout.pipeline, layout.tensor, layout.context, layout.expert, layout.chunks, layout.zero, layout.shard)
    words = (layout.schedule, str(layout.recompute), layout.reduce_every)
    return (priced.score, *axes, layout.microbatch_size, *words, layout.order)


def _groups(splits: Splits, bounds: Floats, *, on_cores: bool) -> list[Ints]:
    """Rows that share microbatch, tensor, context and expert axes; the group with the lowest bound first.

    On cores rows share all axes: what a rank computes with depends on how many there are.
    """
    if not len(splits):
        return []
    key = splits.tensor
    more = (splits.pipeline, splits.data) if on_cores else ()
    for column in (splits.context, splits.expert, splits.size, *more):
        key = key * (int(column.max()) + 1) + column
    _, inverse = np.unique(key, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    edges = np.flatnonzero(np.diff(inverse[order])) + 1
    groups = np.split(order, edges)
    return sorted(groups, key=lambda rows: float(bounds[rows].min()))


class _Finaliser:
    """Turns priced layouts into candidates."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        cluster = state.cost_model.cluster
        speeds = [(node.count * node.devices.count, speed_of(node.devices)) for node in cluster.nodes]
        self._balancer, self._relative_speed = None, 1.0
        if len(kinds_of(cluster)) > 1:
            self._balancer = Balancer(state.cost_model)
            mean = sum(count * speed for count, speed in speeds) / cluster.num_devices
            self._relative_speed = mean / min(speed for _, speed in speeds)

    def candidate(self, priced: PricedLayout) -> Candidate:
        """Return a layout with its plan and all that is said of it; its data ranks balanced over unequal devices."""
        state, layout, shares = self._state, priced.layout, None
        batch = state.global_batch_size
        balanced = self._balancer.balance(layout, batch) if self._balancer is not None else None
        if balanced is None or state.acceptance.problem(balanced.layout, balanced.shares):
            prediction = state.cost_model.predict(layout, exact=True)
        else:
            layout, shares, prediction = balanced.layout, balanced.shares, balanced.prediction
        plan = state.acceptance.plan(layout, shares)
        speed = self._relative_speed
        return candidate_of(state.cost_model, state.objective, batch, layout, prediction, plan, relative_speed=speed)
