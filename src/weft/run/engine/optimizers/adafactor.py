"""Adafactor (Shazeer and Stern, 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost")."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.recipe import OptimizerGroup
from weft.run.engine.optimizers._base import ShardOptimizer, whole_names
from weft.run.engine.optimizers._matrix import MatrixRange, MatrixSums, matrix_run
from weft.run.engine.optimizers._sums import ParameterSums, squared_sum
from weft.techniques.core import CheckpointShard, Segment, Shard, resident_groups

_CLIP = 1.0
"""Largest RMS of an update (d in the paper)."""
_SMALLEST_RMS = 1e-3
"""Floor of a parameter's RMS when steps are relative (ε₂)."""


@final
class Adafactor(ShardOptimizer):
    """Second moments factored over the last two dimensions, whole for parameters with fewer.

    The variant: β₂ = 1 − t^−0.8, ε₁ added to the squared gradient, updates clipped to RMS 1, no first moment, decay
    decoupled.  The step is the learning rate itself, or with `relative_step` max(1e-3, RMS(w)) · min(learning rate,
    1/√t).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[OptimizerGroup],
        mesh: Mesh,
        *,
        epsilon: float = 1e-30,
        relative_step: bool = False,
    ) -> None:
        super().__init__(shards, groups)
        self._epsilon = epsilon
        self._relative_step = relative_step
        self._device = mesh.device
        self._places = list(self._counts.places())
        self._runs = {p: matrix_run(p, i, s) for p, i, s in self._places if len(s.local_shape) >= 2}
        self._matrices = MatrixSums(self._shards, list(self._runs.values()), whole_names(groups), mesh)
        self._sums = ParameterSums(self._shards, whole_names(groups), mesh)
        self._rows = {p: self._zeros(run, run.shape[:-1]) for p, run in self._runs.items()}
        self._columns = {p: self._zeros(run, run.shape[:-2] + run.shape[-1:]) for p, run in self._runs.items()}
        self._variances = {
            p: torch.zeros_like(self._shards[i].master[s.offset : s.offset + s.length])
            for p, i, s in self._places
            if p not in self._runs
        }

    def _zeros(self, run: MatrixRange, shape: Sequence[int]) -> Tensor:
        return torch.zeros(
            tuple(shape), dtype=self._shards[run.shard].master.dtype, device=self._shards[run.shard].master.device
        )

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        self._counts.advance(skipped)
        gradients = [self._gradient(index) for index in range(len(self._shards))]
        if gradient_scale != 1.0:
            for gradient in gradients:
                gradient.mul_(gradient_scale)
        self._follow_matrices(gradients, skipped)
        for position, index, segment in self._live(skipped):
            if position not in self._runs:
                self._turn_vector(position, gradients[index][segment.offset : segment.offset + segment.length])
        self._apply(gradients, learning_rate, skipped)

    def _live(self, skipped: Collection[str]) -> Iterator[tuple[int, int, Segment]]:
        return (place for place in self._places if place[2].layout.name not in skipped)

    def _weight(self, position: int) -> float:
        """Weight of the newest squared gradient, 1 − β₂."""
        # β₂ = 1 − t^−0.8 (the paper): it is 0 in the first step, so the zero start needs no bias correction, and
        # it approaches 1 slowly enough for the second moments to keep following the gradients.
        return float(self._counts.counts[position]) ** -0.8

    def _turn_vector(self, position: int, gradient: Tensor) -> None:
        variance = self._variances[position]
        variance.lerp_(gradient.square().add_(self._epsilon), self._weight(position))
        gradient.mul_(variance.rsqrt())

    def _follow_matrices(self, gradients: Sequence[Tensor], skipped: Collection[str]) -> None:
        """Update row and column means of the squared gradients, and turn the gradients into updates."""
        live = [run for run in self._runs.values() if run.segment.layout.name not in skipped]
        rows: dict[int, Tensor] = {}
        columns: dict[int, Tensor] = {}
        for run in live:
            # (…, R, C) on this rank → sums (…, R) and (…, C).  Sums and not means: ranks that hold other rows or
            # columns of a matrix add theirs, and the division is by the sizes of the full matrix.
            squares = run.elements(gradients[run.shard]).square().add_(self._epsilon)
            rows[run.position], columns[run.position] = squares.sum(-1), squares.sum(-2)
        sums = [(rows[run.position], run.axes_along(-1)) for run in live]
        sums += [(columns[run.position], run.axes_along(-2)) for run in live]
        self._matrices.over_splits(sums)
        self._matrices.columns_over_cut(live, columns, self._dtype(gradients))
        for run in live:
            whole, weight = run.segment.layout.shape, self._weight(run.position)
            self._rows[run.position].lerp_(rows[run.position].div_(whole[-1]), weight)
            self._columns[run.position].lerp_(columns[run.position].div_(whole[-2]), weight)
        self._turn_matrices(gradients, live)

    def _turn_matrices(self, gradients: Sequence[Tensor], live: Sequence[MatrixRange]) -> None:
        # The second moment of element (i, j) is estimated as rowᵢ · columnⱼ / mean(row); `levels` are these means.
        # With one factor divided by the mean here, the update is g / √(rowᵢ/mean) / √columnⱼ, and no matrix of moments
        # is formed.
        levels = {run.position: self._rows[run.position].sum(-1, keepdim=True) for run in live}
        self._matrices.over_splits([(levels[run.position], run.axes_along(-2)) for run in live])
        self._matrices.scalars_over_cut(live, levels, self._dtype(gradients))
        for run in live:
            level = levels[run.position].div_(run.segment.layout.shape[-2])
            update = run.elements(gradients[run.shard])
            update.mul_((self._rows[run.position] / level).rsqrt_().unsqueeze(-1))
            update.mul_(self._columns[run.position].rsqrt().unsqueeze(-2))

    def _dtype(self, gradients: Sequence[Tensor]) -> torch.dtype:
        return gradients[0].dtype if gradients else torch.float32

    def _apply(self, updates: Sequence[Tensor], learning_rate: float, skipped: Collection[str]) -> None:
        """Clip the updates by their RMS, decay the parameters and move them."""
        # The RMS is of a full parameter, of which this rank may hold a part: hence one sum over ranks for all
        # parameters.
        rms = self._rms(updates)
        shrink = rms[0].div(_CLIP).clamp(min=1.0).reciprocal()
        for here in resident_groups(self._shards, states=False):
            for position, index, segment in self._live(skipped):
                if index in here:
                    largest = rms[1][position] if self._relative_step else None
                    self._move(position, index, segment, updates[index], shrink[position], largest, learning_rate)

    def _move(
        self,
        position: int,
        index: int,
        segment: Segment,
        update: Tensor,
        shrink: Tensor,
        size: Tensor | None,
        learning_rate: float,
    ) -> None:
        """Move one parameter; `size` is its RMS, where steps are relative to it."""
        here = slice(segment.offset, segment.offset + segment.length)
        master, settings = self._shards[index].master[here], self._settings(index)
        rate = torch.full_like(shrink, learning_rate * settings.learning_rate_scale)
        if size is not None:
            rate = rate.clamp(max=1.0 / math.sqrt(int(self._counts.counts[position])))
            rate *= size.clamp(min=_SMALLEST_RMS)
        if settings.weight_decay:
            master.mul_((1.0 - rate * settings.weight_decay).to(master))
        master.addcmul_(update[here], (rate * shrink).to(master), value=-1.0)

    def _rms(self, updates: Sequence[Tensor]) -> Tensor:
        """Root mean squares of whole updates, and where steps are relative of whole parameters, fp64 (kinds,
        segments)."""
        sums = torch.zeros(1 + int(self._relative_step), len(self._places), dtype=torch.float64, device=self._device)
        self._add_squares(sums[0], updates, range(len(self._shards)))
        if self._relative_step:
            for here in resident_groups(self._shards, states=False, writes=False):
                self._add_squares(sums[1], [shard.master for shard in self._shards], here)
        sizes = torch.tensor([max(s.layout.shape.numel(), 1) for _, _, s in self._places], device=self._device)
        return (self._sums.total(sums) / sizes).sqrt()

    def _add_squares(self, sums: Tensor, flats: Sequence[Tensor], here: Collection[int]) -> None:
        for position, index, segment in self._places:
            if index in here:
                sums[position] = squared_sum(flats[index][segment.offset : segment.offset + segment.length])

    def state_bytes(self) -> int:
        states = (*self._rows.values(), *self._columns.values(), *self._variances.values())
        return sum(state.numel() * state.element_size() for state in states)

    def _iterate_shards(self) -> Iterator[CheckpointShard]:
        for position, index, segment in self._places:
            shard = self._shards[index]
            if position in self._runs:
                run = self._runs[position]
                yield run.row_shard(self._rows[position], shard.counts)
                yield run.column_shard(self._columns[position], shard.counts)
            else:
                yield CheckpointShard(
                    name=f"optimizer/variance/{segment.layout.name}",
                    shape=segment.layout.shape,
                    tensor=self._variances[position],
                    split=segment.layout.split,
                    start=segment.start,
                    counts=shard.counts,
                )
        yield from self._counts.checkpoint_shards()
