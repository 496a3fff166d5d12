"""Parameters as (stacks of) matrices, of which a rank may hold some of the rows or columns; sums across those cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.collectives import all_reduce
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import AXES, Axis
from weft.errors import PlanError
from weft.run.engine.optimizers._sums import cutting_groups, is_cut_over
from weft.techniques.core import CheckpointShard, Segment, Shard


@dataclass(frozen=True, slots=True)
class MatrixRange:
    """A segment of a parameter (..., R, C) with two or more dimensions, cut at most between indices of its first
    one."""

    position: int
    """Position of the segment among all of the rank."""
    shard: int
    segment: Segment
    shape: torch.Size
    """Shape of what this rank holds."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def axes_along(self, dim: int) -> frozenset[Axis]:
        """The axes whose ranks hold other rows (`dim` −2) or columns (−1) of the same matrices."""
        return self.segment.layout.axes_along(self.ndim + dim)

    @property
    def rows_cut(self) -> bool:
        """Whether data ranks hold other rows of the same matrix (of a stack, they hold other matrices)."""
        return self.ndim == 2 and not self.segment.is_whole

    def elements(self, flat: Tensor) -> Tensor:
        """View this run of a flat shard in its shape."""
        return flat[self.segment.offset : self.segment.offset + self.segment.length].view(self.shape)

    def row_shard(self, state: Tensor, shard_counts: bool) -> CheckpointShard:
        """The checkpoint shard of a state (..., R): one number for each row."""
        layout = self.segment.layout
        return CheckpointShard(
            name=f"optimizer/row/{layout.name}",
            shape=layout.shape[:-1],
            tensor=state.view(-1),
            split=layout.split.without(self.ndim - 1),
            start=self.segment.start // self.segment.local_shape[-1],
            counts=shard_counts and layout.split.is_first_along(self.ndim - 1),
        )

    def column_shard(self, state: Tensor, shard_counts: bool) -> CheckpointShard:
        """The checkpoint shard of a state (..., C): one number for each column."""
        layout = self.segment.layout
        first = self.ndim > 2 or self.segment.start == 0
        return CheckpointShard(
            name=f"optimizer/column/{layout.name}",
            shape=layout.shape[:-2] + layout.shape[-1:],
            tensor=state.view(-1),
            split=layout.split.without(self.ndim - 2),
            start=self.segment.start // self.segment.local_shape[-2] if self.ndim > 2 else 0,
            counts=shard_counts and first and layout.split.is_first_along(self.ndim - 2),
        )


def matrix_run(position: int, shard: int, segment: Segment) -> MatrixRange:
    """Describe a segment of a parameter with two or more dimensions.

    Raises:
        PlanError: The segment begins or ends inside a row.
    """
    shape = segment.local_shape  # of the tensor rank's part, of which the segment is a run of elements
    step = max(shape[1:].numel(), 1)
    if segment.start % step or segment.length % step:
        raise PlanError(
            f"{segment.layout.name} is cut at elements {segment.start} to {segment.start + segment.length} of its "
            f"{tuple(shape)} on this rank, inside a row of {step}. Adafactor keeps statistics by row and column and "
            f"needs whole rows. Cut the buckets at parameter borders, as its `cuts` asks, or set data_parallel.zero = 0"
        )
    return MatrixRange(position, shard, segment, torch.Size((segment.length // step, *shape[1:])))


class MatrixSums:
    """Adds up row, column and total sums over the ranks that share matrices.  Calling it is collective."""

    def __init__(self, shards: Sequence[Shard], runs: Sequence[MatrixRange], names: Sequence[str], mesh: Mesh) -> None:
        self._device = mesh.device
        axes: set[Axis] = {axis for run in runs for axis in run.segment.layout.split_axes}
        self._views = {axis: mesh.group_over([axis]) for axis in AXES if axis in axes}
        self._shards = shards
        self._cuts = [(view, self._widths(names, view)) for view in cutting_groups(shards)]

    def _widths(self, names: Sequence[str], view: GroupView) -> dict[str, int]:
        """Columns of every matrix whose rows are cut over `view`, also of those of which this rank holds no row."""
        # A rank must take part in the sums of a matrix even where it holds none of its rows, with as many zeros.
        cut: dict[str, int] = {}
        for shard in self._shards:
            cut.update(shard.cut_matrices if is_cut_over(shard, view) else {})
        return {name: cut[name] for name in names if name in cut}

    def _cut_over(self, runs: Iterable[MatrixRange], view: GroupView) -> list[MatrixRange]:
        return [run for run in runs if run.rows_cut and is_cut_over(self._shards[run.shard], view)]

    def over_splits(self, sums: Sequence[tuple[Tensor, frozenset[Axis]]]) -> None:
        """Add up tensors in place, each over its axes.  All ranks of an axis bring the same shapes in the same
        order."""
        # One collective for each axis, over all tensors together: their number, and not their bytes, would cost the
        # time.
        for axis, view in self._views.items():
            chosen = [tensor for tensor, axes in sums if axis in axes]
            if view.group is not None and chosen:
                _spread(all_reduce(torch.cat([part.reshape(-1).to(self._device) for part in chosen]), view), chosen)

    def columns_over_cut(self, runs: Sequence[MatrixRange], sums: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Add up one number per column (`sums`, by position) of every matrix whose rows are cut over data ranks."""
        for view, widths in self._cuts:
            self._over_cut(self._cut_over(runs, view), sums, view, widths, dtype)

    def scalars_over_cut(self, runs: Sequence[MatrixRange], sums: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        """Add up one number (`sums`, by position) per matrix cut between rows over data ranks."""
        for view, widths in self._cuts:
            self._over_cut(self._cut_over(runs, view), sums, view, dict.fromkeys(widths, 1), dtype)

    def _over_cut(
        self,
        runs: Sequence[MatrixRange],
        sums: Mapping[int, Tensor],
        view: GroupView,
        widths: Mapping[str, int],
        dtype: torch.dtype,
    ) -> None:
        if not widths:
            return
        # Two parts of this rank may hold the same rows of a tied parameter: they count once, and both learn the sum.
        by_name: dict[str, list[Tensor]] = {}
        for run in runs:
            by_name.setdefault(run.segment.layout.name, []).append(sums[run.position])
        zeros = {name: torch.zeros(width, dtype=dtype, device=self._device) for name, width in widths.items()}
        parts = [by_name[name][0].reshape(-1).to(self._device) if name in by_name else zeros[name] for name in widths]
        flat = all_reduce(torch.cat(parts), view)
        for name, total in zip(widths, flat.split(list(widths.values())), strict=True):
            for part in by_name.get(name, ()):
                part.copy_(total.view_as(part))


def _spread(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy consecutive runs of `flat` into `targets`."""
    for target, values in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        target.copy_(values.view_as(target))
