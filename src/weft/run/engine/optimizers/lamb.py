"""LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.recipe import OptimizerGroup
from weft.run.engine.optimizers._base import ShardOptimizer
from weft.run.engine.optimizers._ranges import ShardRange
from weft.run.engine.optimizers._trust import LayerNorms
from weft.techniques.core import Segment, Shard, resident_groups


@final
class LAMB(ShardOptimizer):
    """Adam's bias-corrected direction plus decay, rescaled parameter by parameter to the norm of the parameter.

    The step is lr · ‖w‖ / ‖u‖ · u with u = m̂ / (√v̂ + ε) + decay · w; the ratio is 1 where a norm is 0, and for
    biases and norms unless `adapt_one_dimensional`.  The authors bound neither the norms nor the ratio in their
    experiments.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[OptimizerGroup],
        mesh: Mesh,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        adapt_one_dimensional: bool = False,
    ) -> None:
        super().__init__(shards, groups)
        self._betas = betas
        self._epsilon = epsilon
        self._norms = LayerNorms(self._shards, groups, mesh, adapt_one_dimensional=adapt_one_dimensional)
        self._exp_avg = self._add_state("exp_avg")
        self._exp_avg_sq = self._add_state("exp_avg_sq")

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        # Two passes: the ratio of a parameter needs the norm of its whole direction, and so of all ranks' parts.
        # Directions replace gradients in place, and wait there for the sum.
        directions = [self._gradient(index) for index in range(len(self._shards))]
        runs, squares = self._counts.advance(skipped), self._norms.squares(2)
        for here in resident_groups(self._shards):
            for run in runs:
                if run.shard in here:
                    self._turn(run, directions[run.shard][run.start : run.stop], gradient_scale)
            self._norms.add(squares, here, [shard.master for shard in self._shards], directions)
        parameters, updates = self._norms.total(squares)
        ratios = torch.where((parameters > 0) & (updates > 0), parameters / updates, 1.0)
        for here in resident_groups(self._shards, states=False):
            for position, index, segment in self._counts.places():
                if index in here and segment.layout.name not in skipped:
                    self._move(index, segment, directions[index], ratios[position], learning_rate)

    def _move(self, index: int, segment: Segment, direction: Tensor, ratio: Tensor, learning_rate: float) -> None:
        here = slice(segment.offset, segment.offset + segment.length)
        master, rate = self._shards[index].master, learning_rate * self._settings(index).learning_rate_scale
        if self._norms.is_adapted(segment):
            master[here].addcmul_(direction[here], ratio.to(master), value=-rate)
        else:
            master[here].add_(direction[here], alpha=-rate)

    def _turn(self, run: ShardRange, gradient: Tensor, gradient_scale: float) -> None:
        """Update the moments of a run, and put its direction where its gradient was."""
        here = slice(run.start, run.stop)
        exp_avg, exp_avg_sq = self._exp_avg[run.shard][here], self._exp_avg_sq[run.shard][here]
        beta1, beta2 = self._betas
        if gradient_scale != 1.0:
            gradient.mul_(gradient_scale)
        exp_avg.lerp_(gradient, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        # From here on `gradient` holds the denominator, and then the direction: no tensor of its size is allocated.
        torch.sqrt(exp_avg_sq, out=gradient)
        gradient.div_(math.sqrt(1.0 - beta2**run.step)).add_(self._epsilon)
        torch.div(exp_avg, gradient, out=gradient)
        gradient.div_(1.0 - beta1**run.step)
        decay = self._settings(run.shard).weight_decay
        if decay:
            gradient.add_(self._shards[run.shard].master[here], alpha=decay)
