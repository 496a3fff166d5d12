"""Stochastic gradient descent with momentum, with the numerics of `torch.optim.SGD`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from weft.config.recipe import OptimizerGroup
from weft.run.engine.optimizers._base import ShardOptimizer
from weft.run.engine.optimizers._fused import FusedKind, fold_scale, gather_runs
from weft.run.engine.optimizers._ranges import ShardRange
from weft.techniques.core import Shard, resident_groups


@final
class SGD(ShardOptimizer):
    """Weight decay is added to the gradient; momentum has no dampening.

    8 M fp32 parameters with momentum on one CPU thread (2026-11): fused 2.4 ms, foreach 3.4 ms.
    """

    counts_steps: ClassVar[bool] = False

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[OptimizerGroup],
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
    ) -> None:
        super().__init__(shards, groups)
        self._momentum = momentum
        self._nesterov = nesterov
        # Without dampening a buffer of zeros gives the first step that torch takes without one.
        self._buffers: list[Tensor] = self._add_state("momentum_buffer") if momentum else []

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        updated = self._counts.advance(skipped)
        for here in resident_groups(self._shards):
            for kind, runs in gather_runs(updated, self._shards, here).items():
                self._call(kind, runs, learning_rate, gradient_scale)

    def _call(self, kind: FusedKind, runs: list[ShardRange], learning_rate: float, gradient_scale: float) -> None:
        settings = self._groups[kind.group].settings
        gradients = [self._gradient(run.shard)[run.start : run.stop] for run in runs]
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]  no public name takes flats
            [self._shards[run.shard].master[run.start : run.stop] for run in runs],
            gradients,
            [self._buffers[run.shard][run.start : run.stop] for run in runs] if self._momentum else [],
            weight_decay=settings.weight_decay,
            momentum=self._momentum,
            lr=learning_rate * settings.learning_rate_scale,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,
            grad_scale=fold_scale(gradients, gradient_scale, kind),
        )
