"""What every gradient reducer offers, and the reducers of one rank as one.

A reducer owns the gradients of some parameters: where they accumulate, when they are reduced, which part this rank
keeps, and how updated masters come back into the parameters.  The engine, the optimizers and the checkpoints see only
its shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from weft.techniques.core._shard import CheckpointShard, Shard


class GradientReducer(Protocol):
    """Owner of the gradients of some of this rank's parameters.  Every method is called on every rank, in one order."""

    @property
    def shards(self) -> Sequence[Shard]: ...

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        ...

    def on_microbatch(self, remaining: int) -> None:
        """Hear that a microbatch's backward comes next, with `remaining` more after it.  Never under a pipeline."""
        ...

    def on_backward(self, part: int, remaining: int) -> None:
        """Hear that a backward comes next which completes a part's gradients, with `remaining` more after it."""
        ...

    def on_last_forward(self, part: int) -> None:
        """Hear that the next backward of a part is its last in this step: reductions may start inside of it."""
        ...

    def on_last_backward(self, part: int) -> None:
        """Hear that every weight gradient of a part is complete."""
        ...

    @property
    def takes_back(self) -> bool:
        """Whether `take_back` is supported."""
        ...

    def take_back(self) -> None:
        """Undo `on_last_forward`: another backward of this step follows after all.

        Reductions under way are completed.  Their results count once in the sums that are still to come.
        """
        ...

    def finish(self) -> None:
        """Wait for the reductions and set every shard's `gradient`."""
        ...

    def on_applied(self, skipped: Collection[str]) -> None:
        """Hear that the optimizer has applied this step's gradients, except for the parameters `skipped`.

        It is not called for a step whose gradients were not finite: the state of compression must not change then.
        """
        ...

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return the state of the reductions for a checkpoint: residuals and bases of compression."""
        ...

    def start_weight_gather(self) -> None:
        """Cast the masters to the weights, and start to gather them.

        Gathers may still be under way on return; forwards wait for the weights that they read.  Masters must not change
        until the gathers have ended.
        """
        ...

    def wait_weights(self) -> None:
        """Wait until all gathers of `start_weight_gather` have ended."""
        ...

    def release(self) -> None:
        """Drop gathered weights, so that the model holds only this rank's shards.  No gather runs afterwards."""
        ...

    def names(self) -> frozenset[str]:
        """Return the names of all parameters of this reducer; the same on all data and tensor ranks of a stage."""
        ...

    def unused(self) -> frozenset[str]:
        """Return the names of the parameters without a gradient in this rank's step.

        A tied parameter is unused where no stage that holds it has used it.
        """
        ...

    def model_state_bytes(self) -> dict[str, int]:
        """Return the bytes between steps by kind: `parameters`, `gradients`, `masters` and `residuals`.

        `masters` are 0 where the master is the parameter itself.
        """
        ...

    def close(self) -> None:
        """Let go of the model and of what runs in the background, before process groups end.  No steps follow."""
        ...


class ReducerSet:
    """All reducers of one rank, driven together and in one order, so that collectives match across ranks."""

    def __init__(self, stores: Sequence[GradientReducer]) -> None:
        self.stores = tuple(stores)

    @property
    def shards(self) -> list[Shard]:
        return [shard for store in self.stores for shard in store.shards]

    def begin_step(self) -> None:
        for store in self.stores:
            store.begin_step()

    def on_microbatch(self, remaining: int) -> None:
        for store in self.stores:
            store.on_microbatch(remaining)

    def on_backward(self, part: int, remaining: int) -> None:
        for store in self.stores:
            store.on_backward(part, remaining)

    def on_last_forward(self, part: int) -> None:
        for store in self.stores:
            store.on_last_forward(part)

    def on_last_backward(self, part: int) -> None:
        for store in self.stores:
            store.on_last_backward(part)

    @property
    def takes_back(self) -> bool:
        return all(store.takes_back for store in self.stores)

    def take_back(self) -> None:
        for store in self.stores:
            store.take_back()

    def finish(self) -> None:
        for store in self.stores:
            store.finish()

    def on_applied(self, skipped: Collection[str]) -> None:
        for store in self.stores:
            store.on_applied(skipped)

    def checkpoint_shards(self) -> list[CheckpointShard]:
        return [stored for store in self.stores for stored in store.checkpoint_shards()]

    def gather_weights(self) -> None:
        """Cast and gather the weights, and wait until they are unsharded."""
        self.start_weight_gather()
        self.wait_weights()

    def start_weight_gather(self) -> None:
        """Start to cast and gather the weights.  The next forwards wait for those they read, `wait_weights` for all."""
        for store in self.stores:
            store.start_weight_gather()

    def wait_weights(self) -> None:
        for store in self.stores:
            store.wait_weights()

    def release(self) -> None:
        for store in self.stores:
            store.release()

    def names(self) -> frozenset[str]:
        return frozenset().union(*(store.names() for store in self.stores))

    def unused(self) -> frozenset[str]:
        return frozenset().union(*(store.unused() for store in self.stores))

    def model_state_bytes(self) -> dict[str, int]:
        total = {"parameters": 0, "gradients": 0, "masters": 0, "residuals": 0}
        for store in self.stores:
            for kind, size in store.model_state_bytes().items():
                total[kind] += size
        return total

    def close(self) -> None:
        for store in self.stores:
            store.close()
