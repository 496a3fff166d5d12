"""The same two steps under a plan, by the training itself, which is put back as it was before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.events import StepEvent
from weft.model.blueprint import Batch
from weft.run.engine import TrainingState
from weft.run.engine.proof._plain import STEPS, generators_kept, gradients_of_loss, held_tensors, unheard
from weft.run.engine.proof._snapshot import Snapshot
from weft.techniques.core import CheckpointShard, checkpoint_shards_of
from weft.techniques.randomness.quiet import DrawLedger, quiet


@dataclass(slots=True, kw_only=True)
class StepsOfRank:
    """Results of the steps under the plan, on one rank."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    shards: list[CheckpointShard] = field(default_factory=list[CheckpointShard])
    """Copies, named as the tensors of a `PlainResult`."""
    repeated: frozenset[str] = frozenset()
    """Keys that two draws of one forward have had."""


def planned_steps(
    training: TrainingState,
    microbatches: Sequence[Batch],
    *,
    loss: object,
    optimizer: torch.optim.Optimizer | None,
    rate: Callable[[int], float],
    begins: Callable[[], None] = lambda: None,
    ends: Callable[[StepEvent], None] = lambda event: None,
) -> StepsOfRank:
    """Take two steps on this data rank's microbatches, and put everything back.  Call on every rank.

    Args:
        training: under a plan that permits nothing but exact mathematics, before its first step.
        microbatches: of both steps, each on copies, for a forward may write to what it is given.
        loss: looked through for what it holds.
        optimizer: the user's own, of a session; None: the engine's.
        rate: learning rate of a step.
        begins, ends: called around each step.

    Raises:
        Exception: what a step raises; nothing is put back then.
    """
    model, device = training.model, training.model.mesh.device
    parts = [("model", part.module) for part in model.parts]
    snapshot = Snapshot(*parts, ("loss", loss), ("optimizer", optimizer), except_weights_of=[m for _, m in parts])
    # Masters and states lie in stores, which the snapshot of modules does not reach; they are copied as a save sees
    # them.
    before = [(shard, shard.tensor.clone()) for shard in training.checkpoint_shards()]
    state, skipped = training.state(), training.stepper.num_skipped
    outcome, ledgers = StepsOfRank(), list[DrawLedger]()
    with ExitStack() as stack:
        stack.enter_context(generators_kept(device))
        stack.enter_context(unheard())
        for part in model.parts:
            ledgers.append(stack.enter_context(quiet([part.module], part.context)))
        shown = training.stepper.gradients_shown(lambda factor: _keep_gradients(outcome, training, factor))
        stack.enter_context(shown)
        for step in range(STEPS):
            begins()
            fresh = [{name: value.clone() for name, value in batch.items()} for batch in microbatches]
            event = training.stepper(fresh, step=step, learning_rate=rate(step))
            ends(event)
            if step == 0:
                outcome.shards += [_whole(name, value) for name, value in gradients_of_loss(loss).items()]
            outcome.losses.append(event.loss)
            outcome.norms.append(event.gradient_norm)
        training.model.stores.wait_weights()
    outcome.shards += _state_now(training, snapshot)
    outcome.repeated = frozenset(key for ledger in ledgers for key in ledger.repeated)
    # Modules first: restoring the state gathers weights into them from the masters.
    snapshot.put_back()
    with torch.no_grad():
        for shard, kept in before:
            shard.tensor.copy_(kept)
    training.restored(state)
    training.stepper.num_skipped = skipped
    return outcome


def _keep_gradients(outcome: StepsOfRank, training: TrainingState, factor: float) -> None:
    """Keep the first step's gradients, by the factor that makes them those of the mean loss."""
    if outcome.losses:
        return
    stores = training.model.stores
    gradients = [shard.dense_gradient() for shard in stores.shards]
    for shard in checkpoint_shards_of("gradient", stores.shards, gradients):
        outcome.shards.append(replace(shard, tensor=shard.tensor.detach().clone() * factor, let_go=None))


def _state_now(training: TrainingState, snapshot: Snapshot) -> list[CheckpointShard]:
    shards: list[CheckpointShard] = []
    for shard in training.checkpoint_shards():
        kind, _, name = shard.name.partition("/")
        if kind in ("model", "buffer"):
            own = f"{'weight' if kind == 'model' else kind}/{name}"
            shards.append(replace(shard, name=own, tensor=shard.tensor.detach().clone(), let_go=None))
    loss_tensors: dict[str, Tensor] = {}
    for part in training.model.parts:
        loss_tensors |= held_tensors(part.module, snapshot)
    return shards + [_whole(name, value) for name, value in loss_tensors.items()]


def _whole(name: str, tensor: Tensor) -> CheckpointShard:
    return CheckpointShard(name=name, shape=tensor.shape, tensor=tensor.reshape(-1))
