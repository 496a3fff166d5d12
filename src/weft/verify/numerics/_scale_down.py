"""Scale a plan down to a few processes: smaller axes, fewer microbatches and blocks, every technique and pattern kept.

What is kept: which axes there are and their order, schedule and chunks, the ZeRO stage, sequence parallelism,
recomputation per block, that cuts and shares are unequal, that a rank has several microbatches.  What shrinks: how many
ranks an axis has, how many microbatches, how many blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config.plan import Axis, MeshPlan, MicrobatchPlan, Plan, Recompute
from weft.errors import PlanError
from weft.techniques.expert.settings import EXPERT_LENDERS
from weft.techniques.tensor.mesh_2d.shape import grid_of_plan, grid_shape, least_ranks
from weft.techniques.tensor.settings import TensorScheme

DEFAULT_PROCESSES = 8
"""Enough for data 2 × tensor 2 × pipeline 2."""
_GROWING: tuple[Axis, ...] = ("pipeline", "tensor", "context", "shard", "replicate")
"""Axes that get the processes left over, first to last: a pipeline of two stages has no middle."""
_SMALL_BUCKET_BYTES = 4096
"""Buckets so small that the shrunk model has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDown:
    """A plan that has been scaled down, and the size of the model that it needs."""

    plan: Plan
    num_blocks: int | None
    """Blocks that the model must have; None: it has none, or nobody knows."""


def min_processes(mesh: MeshPlan, scheme: TensorScheme = "1d") -> int:
    """Return how many processes show every axis of the mesh, and its tensor ranks as the grid that `scheme` makes."""
    return math.prod(_least_sizes(mesh, scheme).values())


def scale_down_plan(plan: Plan, *, processes: int | None, num_blocks: int | None, may_shrink: bool) -> ScaledDown:
    """Return the plan on at most `processes` ranks (None: 8, or as many as its axes need).

    `num_blocks` is how many the model has; `may_shrink` says whether it may get fewer.

    Raises:
        PlanError: so few processes cannot show every axis.
    """
    mesh = _scale_mesh(plan, processes)
    pipeline = plan.pipeline_parallel
    if 1 < mesh.pipeline < plan.mesh.pipeline:
        pipeline = pipeline.with_few_chunks()
    blocks = _ScaledBlocks(plan, pipeline.num_stages(mesh.pipeline), num_blocks or 0, may_shrink)
    buckets = plan.data_parallel.with_small_buckets(_SMALL_BUCKET_BYTES) if may_shrink else plan.data_parallel
    scaled = replace(
        plan,
        mesh=mesh,
        data_parallel=buckets,
        pipeline_parallel=replace(pipeline, cuts=blocks.cuts()),
        microbatch=_scale_microbatches(plan, mesh),
        memory=plan.memory.recomputing(blocks.words()),
        compute=replace(plan.compute, device="cpu").with_threads(1),
        origins={},
    )
    return ScaledDown(plan=scaled, num_blocks=blocks.count() if num_blocks else num_blocks)


# ── axes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _least_sizes(mesh: MeshPlan, scheme: TensorScheme) -> dict[Axis, int]:
    sizes: dict[Axis, int] = {axis: _least(axis, int(getattr(mesh, axis)), scheme) for axis in _GROWING}
    if (lender := _lender(mesh)) is not None:
        sizes[lender] = _least_divisor(mesh.expert)
    return sizes


def _lender(mesh: MeshPlan) -> Axis | None:
    """The axis that keeps its ranks divisible by those that share experts out."""
    if mesh.expert == 1:
        return None
    return next(axis for axis in EXPERT_LENDERS if getattr(mesh, axis) % _least_divisor(mesh.expert) == 0)


def _least_divisor(size: int) -> int:
    return next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)


def _least(axis: Axis, size: int, scheme: TensorScheme) -> int:
    """Ranks that an axis is scaled down to: two, or as many as keep what the tensor axis divides divisible, or as many
    as make a grid of the same kind."""
    if axis == "tensor" and (shape := grid_shape(scheme, size)) is not None:
        return least_ranks(scheme) if shape.side % 2 == 0 else size
    if axis != "tensor":
        return min(size, 2)
    return _least_divisor(size)


def _scale_mesh(plan: Plan, processes: int | None) -> MeshPlan:
    mesh, scheme = plan.mesh, plan.tensor_parallel.scheme
    least = min_processes(mesh, scheme)
    limit = max(DEFAULT_PROCESSES, least) if processes is None else processes
    if limit >= mesh.world_size:
        return mesh
    if limit < least:
        axes = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in _GROWING if getattr(mesh, axis) > 1)
        raise PlanError(
            f"processes = {limit} is too few to show {axes}, each with 2 ranks at least. Use {least} or more."
        )
    sizes, lender = _least_sizes(mesh, scheme), _lender(mesh)
    # Every axis begins at its least size.  What is left of the limit goes to one axis after another, as far as each of
    # them can take it, because more ranks of one axis show more than a few more of each.
    for axis in _GROWING:
        whole = sizes[axis] if axis == "tensor" and scheme != "1d" else int(getattr(mesh, axis))  # grids do not grow
        step = _least_divisor(mesh.expert) if axis == lender else 1
        while (grown := _next_size(axis, sizes[axis], whole, step)) is not None:
            if math.prod(sizes.values()) // sizes[axis] * grown > limit:
                break
            sizes[axis] = grown
    room = sizes["shard"] * sizes["context"]
    expert = math.gcd(mesh.expert, room)  # it divides the model's experts, as mesh.expert does
    return replace(mesh, expert=expert, **sizes)


def _next_size(axis: Axis, now: int, whole: int, step: int) -> int | None:
    """The next larger size of an axis; that of the tensor axis is a multiple, and divides the whole one."""
    step = now if axis == "tensor" else step
    larger = (n for n in range(now + step, whole + 1, step) if axis != "tensor" or whole % n == 0)
    return None if now == 1 else next(larger, None)


# ── microbatches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _scale_microbatches(plan: Plan, mesh: MeshPlan) -> MicrobatchPlan:
    """Fewer and smaller ones; whether there are fewer than stages, and which data ranks have more, stays."""
    shares = plan.microbatch.shares(plan.mesh.data)
    fewest = min(shares)
    # A pipeline needs a warm-up, a steady phase and a cool-down; an odd number is divided by no axis.
    enough = 2 * mesh.pipeline + 1 if mesh.pipeline > 1 else 3
    if fewest < plan.mesh.pipeline:  # a pipeline that never fills must not fill here either
        enough = max(1, mesh.pipeline - 1)
    # Differences between ranks stay, by 2 at most: one more microbatch shows unequal shares as well as ten.
    base = min(fewest, enough)
    chosen = [shares[index] for index in _spread(len(shares), mesh.data)]
    # Evenly spread positions may miss the data ranks whose shares differ.  That some differ must stay.
    if len(set(chosen)) == 1 and len(set(shares)) > 1:
        chosen[-1] = next(share for share in shares if share != chosen[0])
    lowest = min(chosen)
    scaled = tuple(base + min(share - lowest, 2) for share in chosen)
    size = min(plan.microbatch.size, 5 if max(scaled) == 1 else 3)
    if (shape := grid_of_plan(replace(plan, mesh=mesh))) is not None:
        size = shape.sample_parts
    return MicrobatchPlan.of(size, scaled)


def _spread(whole: int, count: int) -> list[int]:
    """`count` positions out of `whole`, first and last among them, evenly between."""
    return [round(index * (whole - 1) / max(1, count - 1)) for index in range(count)]


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _ScaledBlocks:
    """Blocks of a plan that is scaled down: their number, their stages, and their recomputation."""

    plan: Plan
    stages: int
    whole: int
    """Blocks of the model as it is; 0: unknown."""
    may_shrink: bool

    def count(self) -> int:
        if not self.may_shrink or self.whole == 0:
            return self.whole
        words = set(self.plan.memory.block_words) if self.plan.memory.differs_by_block else set[str]()
        sizes = self._sizes()
        least = sum(sizes) if sizes is not None else self.stages + 1 if self.stages > 1 else 2
        return min(self.whole, max(least, len(words)))

    def cuts(self) -> tuple[int, ...] | None:
        sizes = self._sizes()
        if sizes is None or self.stages == 1:
            return None
        if not self.whole:
            return self.plan.pipeline_parallel.cuts if self.stages == self.plan.num_stages else None
        total, count, cuts = sum(sizes), self.count(), list[int]()
        for stage in range(1, self.stages):
            even = round(count * sum(sizes[:stage]) / total)
            # One block at least for this stage, and for each that follows.
            cuts.append(min(max(even, (cuts[-1] if cuts else 0) + 1), count - (self.stages - stage)))
        return tuple(cuts)

    def words(self) -> Recompute | tuple[Recompute, ...]:
        """Return the recomputation: one word for all blocks, or one per block so that each word of the plan stays."""
        words = self.plan.memory.block_words
        if not self.plan.memory.differs_by_block:
            return words[0]
        if not self.whole:
            return words
        chosen: list[Recompute] = [words[index] for index in _spread(len(words), self.count())]
        for word in dict.fromkeys(words):
            # A word that the spread has missed takes the place of the last block with the commonest word.
            if word not in chosen:
                common = max(chosen, key=chosen.count)
                chosen[len(chosen) - 1 - chosen[::-1].index(common)] = word
        return tuple(chosen)

    def _sizes(self) -> list[int] | None:
        """Blocks of each stage that is left when the plan gives cuts: equal stages stay equal, longer ones longer."""
        cuts = self.plan.pipeline_parallel.cuts
        if cuts is None:
            return None
        edges: Sequence[int] = (0, *cuts, max(self.whole, cuts[-1] + 1))
        whole = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
        if self.stages == len(whole) and not self.may_shrink:
            return whole
        chosen = [whole[index] for index in _spread(len(whole), self.stages)]
        if len(set(chosen)) == 1 and len(set(whole)) > 1:
            chosen[-1] = next(size for size in whole if size != chosen[0])
        levels = sorted(set(chosen))
        if len(levels) == 1:
            return [min(levels[0], 2)] * self.stages
        return [1 + min(levels.index(size), 2) for size in chosen]
