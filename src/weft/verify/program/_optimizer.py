"""Sums over ranks by optimizers that look at whole parameters (`weft.run.engine.optimizers`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from weft.techniques.buckets.program import buckets_of, masters_of, own_region
from weft.techniques.send_trace import HeldParameter, ModelShare, RankSend, Shape

_SUM_BYTES = 8
"""Size of a sum over a whole parameter, fp64."""
_KINDS: Mapping[str, int] = {"lamb": 2, "lars": 2, "adafactor": 1}
"""Sums of each parameter: of weights and gradients; of Adafactor's updates."""


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what the optimizer sends in a step in which every parameter is used."""
    kinds = _KINDS.get(share.recipe.optimizer.name)
    if kinds is None or not share.held:
        return
    cut, here, rows_cut = _cut(share)
    # In the order in which ranks make the sums: by size of the group, as `cutting_groups` sorts them.
    axes = sorted(cut, key=lambda axis: cut[axis])
    if share.recipe.optimizer.name == "adafactor":
        kinds += share.recipe.optimizer.relative_step
        matrices = [(parameter, shape) for parameter, shape in here if len(shape) >= 2]
        yield from _statistics(share, matrices, rows_cut)
    if any(parameter.is_split for parameter in share.held):
        axes.append("tensor")
    for axis in axes:
        yield _sum(share, axis, kinds * len(share.held) * _SUM_BYTES, "of whole parameters")


def _cut(share: ModelShare) -> tuple[Mapping[str, int], Sequence[tuple[HeldParameter, Shape]], str]:
    """Axes over which ZeRO cuts parameters of this stage, with their ranks; what this rank holds of which parameter;
    and the axis over which parameters are cut anywhere between rows, if there is one."""
    masters = masters_of(share)
    here = [(held, shape) for held, shape in masters.cut if math.prod(shape)]
    axes = {"shard": share.shards} if masters.cut else {}
    for bucket in buckets_of(share, masters.in_buckets):
        axis, ranks, _ = share.summing_of(is_expert=bucket.key.is_expert)
        start, stop = own_region(share, bucket)
        offsets = zip((masters.in_buckets[place] for place in bucket.places), bucket.offsets, strict=True)
        here += [(held, held.shape) for held, offset in offsets if start <= offset < stop]
        if share.plan.data_parallel.bucket_stage > 0 and ranks > 1 and ranks not in axes.values():
            axes[axis] = ranks
    return axes, here, "shard" if masters.cut else ""


def _statistics(
    share: ModelShare, matrices: Sequence[tuple[HeldParameter, Shape]], rows_cut: str
) -> Iterator[RankSend]:
    """Adafactor's sums over rows and columns that other ranks hold parts of, and the levels of the rows' sums."""
    size = share.master_bytes
    widths = [
        parameter.shape[-1]
        for parameter in share.held
        if len(parameter.shape) == 2 and parameter.shape[0] > 1 and rows_cut
    ]
    over_rows, over_columns, levels = 0, 0, 0
    for parameter, shape in matrices:
        split = parameter.parameter.split if parameter.is_split else None
        if split is not None and split.dim == len(shape) - 1:
            over_rows += math.prod(shape[:-1])
        if split is not None and split.dim == len(shape) - 2:
            over_columns += math.prod(shape[:-2]) * shape[-1]
            levels += math.prod(shape[:-2])
    for elements, columns, what in (
        (over_rows + over_columns, sum(widths), "of squares by row and column"),
        (levels, len(widths), "of squares by matrix"),
    ):
        if elements:
            yield _sum(share, "tensor", elements * size, what)
        if columns:
            yield _sum(share, rows_cut, columns * size, what)


def _sum(share: ModelShare, axis: str, size_bytes: int, what: str) -> RankSend:
    name = share.recipe.optimizer.name
    return RankSend(
        operation="all_reduce",
        axis=axis,
        size_bytes=size_bytes,
        phase="update",
        technique=name,
        reason=f"sums {what}, {name}",
    )
