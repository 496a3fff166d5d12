"""LARS (You, Gitman and Ginsburg, 2017, "Large Batch Training of Convolutional Networks", algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.recipe import OptimizerGroup
from weft.run.engine.optimizers._base import ShardOptimizer
from weft.run.engine.optimizers._trust import LayerNorms
from weft.techniques.core import Segment, Shard, resident_groups


@final
class LARS(ShardOptimizer):
    """Momentum SGD whose step is rescaled parameter by parameter: v ← μ v + lr · λ · (g + decay · w), w ← w − v.

    λ = trust · ‖w‖ / (‖g‖ + decay · ‖w‖) with the authors' trust coefficient 0.001, so that useful learning rates are
    far larger than for SGD; λ is 1 where a norm is 0, and for biases and norms unless `adapt_one_dimensional`.  As in
    the paper the rate stands inside the momentum.
    """

    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[OptimizerGroup],
        mesh: Mesh,
        *,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        adapt_one_dimensional: bool = False,
    ) -> None:
        super().__init__(shards, groups)
        self._momentum = momentum
        self._trust_coefficient = trust_coefficient
        self._norms = LayerNorms(self._shards, groups, mesh, adapt_one_dimensional=adapt_one_dimensional)
        self._buffers = self._add_state("momentum_buffer")

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        gradients = [self._gradient(index) for index in range(len(self._shards))]
        squares = self._norms.squares(2)
        for here in resident_groups(self._shards, states=False, writes=False):
            self._norms.add(squares, here, [shard.master for shard in self._shards], gradients)
        parameters, slopes = self._norms.total(squares)
        slopes = slopes * abs(gradient_scale)
        for here in resident_groups(self._shards):
            for position, index, segment in self._counts.places():
                if index in here and segment.layout.name not in skipped:
                    self._move(
                        segment,
                        index,
                        gradients[index][segment.offset : segment.offset + segment.length],
                        self._local_rate(segment, index, parameters[position], slopes[position]) * learning_rate,
                        gradient_scale,
                    )

    def _local_rate(self, segment: Segment, index: int, parameter: Tensor, slope: Tensor) -> Tensor:
        settings = self._settings(index)
        if not self._norms.is_adapted(segment):
            return torch.full_like(parameter, settings.learning_rate_scale)
        trust = self._trust_coefficient * parameter / (slope + settings.weight_decay * parameter)
        return torch.where((parameter > 0) & (slope > 0), trust, 1.0) * settings.learning_rate_scale

    def _move(self, segment: Segment, index: int, gradient: Tensor, rate: Tensor, gradient_scale: float) -> None:
        here = slice(segment.offset, segment.offset + segment.length)
        master, buffer = self._shards[index].master[here], self._buffers[index][here]
        decay = self._settings(index).weight_decay
        rate = rate.to(master)
        if decay:
            gradient.mul_(gradient_scale).add_(master, alpha=decay).mul_(rate)
        else:
            gradient.mul_(rate * gradient_scale)
        buffer.mul_(self._momentum).add_(gradient)
        master.sub_(buffer)
