"""The contract of optimizers over shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from weft.config.recipe import GroupSettings, OptimizerGroup
from weft.run.engine.optimizers._ranges import StepCounts
from weft.techniques.core import CheckpointShard, Shard, checkpoint_shards_of


class ShardOptimizer(ABC):
    """Updates the masters of this rank's shards in place from their gradients.

    `groups[shard.group]` gives a shard's settings.  Build it on every rank (the constructors of optimizers that look at
    whole parameters agree with other ranks), and keep the shards' `master` tensors for its whole life.  Masters and
    states may be away between two steps: a step works on them within `present`.
    """

    counts_steps: ClassVar[bool] = True
    """Whether the update depends on how often a parameter has been updated."""

    def __init__(self, shards: Sequence[Shard], groups: Sequence[OptimizerGroup]) -> None:
        self._shards = tuple(shards)
        self._groups = tuple(groups)
        self._counts = StepCounts(self._shards, counted=self.counts_steps)
        self._states: dict[str, list[Tensor]] = {}

    @abstractmethod
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        """Update all masters once.  Call on every rank with the same arguments.

        Args:
            learning_rate: Of this step; each group's scale comes on top.
            gradient_scale: Multiplies every gradient: clipping, 1 / loss scale and the count's correction at once.
            skipped: Names of parameters that no rank used in this step.  As in plain torch they keep their values,
                their states and their step counts.

        What `shard.gradient` holds afterwards is undefined: optimizers use it as their working memory.
        """

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return all states for saving and loading, by the names `optimizer/<state>/<parameter>`."""
        return list(self._iterate_shards())

    def state_bytes(self) -> int:
        """Return the bytes of optimizer states on this rank, without the masters."""
        return sum(t.numel() * t.element_size() for states in self._states.values() for t in states)

    def _iterate_shards(self) -> Iterator[CheckpointShard]:
        for name, states in self._states.items():
            yield from checkpoint_shards_of(f"optimizer/{name}", self._shards, states)
        if self.counts_steps:
            yield from self._counts.checkpoint_shards()

    def _add_state(self, name: str) -> list[Tensor]:
        """Create a state, zero at first, with one element for every element of the masters."""
        self._states[name] = [shard.new_state() for shard in self._shards]
        return self._states[name]

    def _settings(self, shard: int) -> GroupSettings:
        return self._groups[self._shards[shard].group].settings

    def _gradient(self, shard: int) -> Tensor:
        """The gradient of a shard in the dtype of its master."""
        own_shard = self._shards[shard]
        assert own_shard.gradient is not None, "the gradient reducer has not finished this step"
        assert own_shard.gradient.numel() == own_shard.size, "a gradient as long as its master"
        return own_shard.gradient.to(own_shard.master.dtype)


def whole_names(groups: Sequence[OptimizerGroup]) -> list[str]:
    """All parameters of this rank's parts in an order that data and tensor ranks share."""
    return sorted({name for group in groups for name in group.names})
