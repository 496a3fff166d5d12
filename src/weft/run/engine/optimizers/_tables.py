"""Optimizers of models that have tables with sparse gradients beside dense parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, final

import torch

from weft.config.recipe import OptimizerGroup
from weft.errors import PlanError
from weft.run.engine.optimizers._base import ShardOptimizer
from weft.run.engine.optimizers._ranges import ShardRange
from weft.run.engine.optimizers._sparse import SparseRule, SparseState, sparse_step
from weft.techniques.core import CheckpointShard, Shard


@final
class TableOptimizer(ShardOptimizer):
    """Updates the rows that a step names, by `sparse_step`; every data rank keeps all states and does the same.

    Raises:
        PlanError: Adam over a table cut along the vocabulary: there every rank's gradient names a row for tokens that
            are elsewhere, which moves its moments.
    """

    counts_steps: ClassVar[bool] = True

    def __init__(
        self,
        shards: Sequence[Shard],
        groups: Sequence[OptimizerGroup],
        *,
        rule: SparseRule,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        super().__init__(shards, groups)
        for name in (s.layout.name for shard in shards for s in shard.segments if rule == "adam" and s.layout.split):
            raise PlanError(
                f'{name} has sparse gradients, optimizer.sparse_rule = "adam" and its rows are cut over the tensor'
                f" axis: Adam would move rows there that no sample names. Give {name.rpartition('.')[0]} the kind"
                ' "replicate" in [model.split], or use sparse_rule = "adagrad" or "sgd".'
            )
        self._rule: SparseRule = rule
        self._betas = betas
        self._epsilon = epsilon
        if rule == "adagrad":
            self._add_state("square_sum")
        elif rule == "adam":
            self._add_state("exp_avg")
            self._add_state("exp_avg_sq")

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        for run in self._counts.advance(skipped):
            self._update(run, learning_rate, gradient_scale)

    def _update(self, run: ShardRange, learning_rate: float, gradient_scale: float) -> None:
        shard = self._shards[run.shard]
        assert shard.rows is not None, "the gradient reducer has not finished this step"
        shape = shard.segments[0].local_shape
        states = {name: tensors[run.shard].view(shape) for name, tensors in self._states.items()}
        sparse_step(
            self._rule,
            shard.master.view(shape),
            shard.rows,
            SparseState(**states, step=run.step - 1),
            learning_rate=learning_rate * self._settings(run.shard).learning_rate_scale,
            gradient_scale=gradient_scale,
            betas=self._betas,
            epsilon=self._epsilon,
        )


@final
class JoinedOptimizers(ShardOptimizer):
    """Several optimizers over different shards as one."""

    def __init__(self, members: Sequence[ShardOptimizer]) -> None:
        super().__init__((), ())
        self._members = tuple(members)

    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        for member in self._members:
            member.step(learning_rate, gradient_scale, skipped)

    def state_bytes(self) -> int:
        return sum(member.state_bytes() for member in self._members)

    def _iterate_shards(self) -> Iterator[CheckpointShard]:
        for member in self._members:
            yield from member.checkpoint_shards()
