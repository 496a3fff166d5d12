"""An exponential moving average of the weights, kept beside the masters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

from weft.errors import RecipeError
from weft.techniques.core import CheckpointShard, Shard, checkpoint_shards_of, exchange_masters, resident_groups


class WeightAverage:
    """average ← decay · average + (1 − decay) · master after every applied step; it starts as the masters it finds.

    It is kept in the dtype of the masters (fp32, or fp64), cut as they are, so no step needs communication.

    Raises:
        RecipeError: `decay` is not between 0 and 1.
    """

    def __init__(self, shards: Sequence[Shard], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise RecipeError(
                f"optimizer.average_decay = {decay} is not between 0 and 1. Usual values are 0.999 to 0.9999"
            )
        self._shards = tuple(shards)
        self._decay = decay
        # Updated from masters and not from weights: in bf16 (1 − decay) · weight would be lost beside the average.
        self._averages = [shard.master.detach().clone() for shard in self._shards]
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Take up the masters of a step that was applied (not one that was skipped)."""
        assert not self._swapped, "the masters hold the average now"
        for here in resident_groups(self._shards, states=False, writes=False):
            for index in here:
                self._averages[index].lerp_(self._shards[index].master, 1.0 - self._decay)

    def reset(self) -> None:
        """Start again from the present masters, for a checkpoint that holds no average."""
        assert not self._swapped, "the masters hold the average now"
        self._copy_masters()

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return the averages for saving and loading, by the names `average/<parameter>`."""
        assert not self._swapped, "the averages hold the masters now"
        return list(checkpoint_shards_of("average", self._shards, self._averages))

    def state_bytes(self) -> int:
        """Return the bytes of the averages on this rank."""
        return sum(average.numel() * average.element_size() for average in self._averages)

    @contextmanager
    def swapped(self, gather_weights: Callable[[], None]) -> Generator[None]:
        """Let the model have the averages inside the block, and its own weights, bit for bit, after it.

        `gather_weights` brings masters into the parameters (the reducers' own, collective where ZeRO cuts
        them), so enter and leave on every rank.
        Masters and averages change places, one shard at a time: there is no third copy.
        """
        assert not self._swapped, "the averages are in the model already"
        self._swapped = not self._swapped
        exchange_masters(self._shards, self._averages)
        try:
            gather_weights()
            yield
        finally:
            # Copies of what lies with the host may be on their way to the device: they would read what comes now.
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self._swapped = not self._swapped
            exchange_masters(self._shards, self._averages)
            gather_weights()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for here in resident_groups(self._shards, states=False, writes=False):
            for index in here:
                self._averages[index].copy_(self._shards[index].master)
