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
        """The backward of a microbatch comes next, with `remaining` more after it (without a pipeline only)."""
        ...

    def on_backward(self, part: int, remaining: int) -> None:
        """A backward of this model part comes next that completes its gradients, with `remaining` more after it."""
        ...

    def on_last_forward(self, part: int) -> None:
        """The next backward of this model part is its last in this step: reductions may start inside it."""
        ...

    def on_last_backward(self, part: int) -> None:
        """Every weight gradient of this model part is complete."""
        ...

    @property
    def takes_back(self) -> bool:
        """Whether `take_back` is had."""
        ...

    def take_back(self) -> None:
        """What was said to be a part's last backward was not: reductions under way come to their end, and what they
        have made is a part of the sums that are still to come."""
        ...

    def finish(self) -> None:
        """Wait for the reductions and set every shard's `gradient`."""
        ...

    def on_applied(self, skipped: Collection[str]) -> None:
        """The optimizer has applied this step's gradients, but for the parameters `skipped`.  Not called for a step
        whose gradients were not finite: then nothing that compression learnt or owes may change."""
        ...

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """What of the reductions themselves must outlive a restart: what compression owes and has learnt."""
        ...

    def start_weight_gather(self) -> None:
        """Bring the masters back into the parameters: cast, then gather.  Gathers may still be under way when it
        returns: forwards wait for what they read.  Nothing may change the masters until they have ended."""
        ...

    def wait_weights(self) -> None:
        """Wait until all weights that `start_weight_gather` gathers are there."""
        ...

    def release(self) -> None:
        """Drop weights that were gathered for computing, so that the model holds only what this rank keeps.  No gather
        is under way afterwards."""
        ...

    def names(self) -> frozenset[str]:
        """Names of all parameters held; the same on all data and tensor ranks of a stage."""
        ...

    def unused(self) -> frozenset[str]:
        """Names of the parameters that took no part in this rank's step; a tied one, in that of no stage that holds
        it."""
        ...

    def model_state_bytes(self) -> dict[str, int]:
        """Bytes at rest between steps by kind: `parameters`, `gradients`, `masters` (0 where a master is the
        parameter) and `compression` (residuals, bases)."""
        ...

    def close(self) -> None:
        """Let go of the model and of what runs in the background, before process groups end.  No steps follow."""
        ...


class ReducerSet:
    """All stores of one rank, driven together and always in the same order, so that collectives match across ranks."""

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
        """Bring the masters back into the parameters, to the end."""
        self.start_weight_gather()
        self.wait_weights()

    def start_weight_gather(self) -> None:
        """Begin to: the next forwards wait for what they read, and `wait_weights` for all."""
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
