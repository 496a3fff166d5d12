"""Builds everything that one rank needs to step: model, optimizer, average, loss scale."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.document import Json, JsonObject
from weft.config.plan import Plan
from weft.config.recipe import OptimizerGroup, Recipe, check_group_globs, group_parameters
from weft.model.blueprint import Blueprint
from weft.run.checkpoint import module_shards
from weft.run.engine._loss_scale import LossScale
from weft.run.engine._step import Stepper
from weft.run.engine.optimizers import ShardOptimizer, check_sparse_tables, create_optimizer
from weft.techniques.build import ParallelModel, parallelize
from weft.techniques.core import CheckpointShard, checkpoint_shards_of, sparse_tables
from weft.techniques.randomness.draws import Draws

if TYPE_CHECKING:
    from weft.run.engine._average import WeightAverage


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Everything that changes on one rank while a recipe trains; `checkpoint_shards` and `state` hold all of it."""

    model: ParallelModel
    optimizer: ShardOptimizer
    average: WeightAverage | None
    loss_scale: LossScale | None
    stepper: Stepper

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return every tensor that a checkpoint holds: masters, frozen parameters, buffers, optimizer states, averages,
        and the plan's own state (residuals and bases of compression, replicas of local steps)."""
        trained = trained_weight_shards(self.model) + self.optimizer.checkpoint_shards()
        for technique in self.model.techniques:
            trained = technique.checkpoint_shards(trained)
        stored_shards = untrained_shards(self.model) + trained + self.model.stores.checkpoint_shards()
        if self.average is not None:
            stored_shards += self.average.checkpoint_shards()
        return stored_shards

    def weights(self) -> list[CheckpointShard]:
        """Return the model alone, for an export.  Call on every rank.

        Where replicas step by themselves, these are the weights that they agreed on last.
        """
        trained = trained_weight_shards(self.model)
        for technique in self.model.techniques:
            trained = technique.checkpoint_shards(trained)
        return untrained_shards(self.model) + [stored for stored in trained if stored.name.startswith("model/")]

    def state(self) -> dict[str, Json]:
        """Return the state that is no tensor, as JSON.  Randomness needs none: it is keyed by seed, step and sample."""
        state: dict[str, Json] = {
            "loss_scale": None if self.loss_scale is None else dict[str, Json](self.loss_scale.state())
        }
        state.update(
            {technique.saved_as: technique.state() for technique in self.model.techniques if technique.saved_as}
        )
        return state

    def check_state(self, state: JsonObject) -> None:
        """Refuse what `state` cannot have returned, whatever the plan that saved it.  Raises `CheckpointError`."""
        if state.values.get("loss_scale") is not None:
            LossScale().check_state(state.object("loss_scale"))
        for technique in self.model.techniques:
            if technique.saved_as in state.values:
                technique.check_state(state.object(technique.saved_as))

    def restored(self, state: Mapping[str, Json]) -> None:
        """Take over a loaded checkpoint after its checkpoint shards have been filled.  Call on every rank."""
        saved = state.get("loss_scale")
        if self.loss_scale is not None and isinstance(saved, Mapping):
            self.loss_scale.load_state(saved)  # pyright: ignore[reportArgumentType]
        self.model.stores.wait_weights()  # gathers that are under way read masters that loading has changed
        for technique in self.model.techniques:
            own = state.get(technique.saved_as)
            technique.load_state(own if isinstance(own, Mapping) else {})
        self.model.stores.gather_weights()

    @contextmanager
    def evaluated(self) -> Generator[None]:
        """Let the model have the weights that are evaluated: their moving average where there is one, and those that
        replicas agreed on last where they step by themselves.  Enter and leave on every rank."""
        self.model.stores.wait_weights()  # what is swapped may be on its way
        gather_weights = self.model.stores.gather_weights
        with ExitStack() as stack:
            for technique in self.model.techniques:
                stack.enter_context(technique.evaluated(gather_weights))
            if self.average is not None:
                stack.enter_context(self.average.swapped(gather_weights))
            yield

    @property
    def is_open(self) -> bool:
        """Whether ranks have taken steps that they have not agreed on yet (a round of local steps)."""
        return any(technique.is_open for technique in self.model.techniques)

    def finish(self) -> None:
        """Agree on the steps taken: no more come, for now.  Call on every rank."""
        self.model.stores.wait_weights()
        changed = [technique.finish() for technique in self.model.techniques]
        if any(changed):
            self.model.stores.gather_weights()

    def close(self) -> None:
        """End what the training runs in the background; no steps follow.  Call it before process groups end."""
        self.model.stores.close()
        for technique in self.model.techniques:
            technique.close()
        self.model.mesh.watch(None)


def trained_weight_shards(model: ParallelModel) -> list[CheckpointShard]:
    """Return this rank's masters, for saving and loading."""
    shards = model.stores.shards
    return list(checkpoint_shards_of("model", shards, [shard.master for shard in shards]))


def untrained_shards(model: ParallelModel) -> list[CheckpointShard]:
    """Return what no optimizer updates: parameters that are not trained, and buffers.  Call on every rank."""
    model.stores.release()
    trained = model.stores.names()
    return [stored for part in model.parts for stored in module_shards(part.module, part.layout, model.mesh, trained)]


def begin_training(
    recipe: Recipe,
    model: ParallelModel,
    optimizer: ShardOptimizer,
    average: WeightAverage | None,
    recorder: Recorder,
    nominal_count: float | None = None,
) -> TrainingState:
    """Join a model and its optimizer with the stepper, and the loss scale that fp16 needs, whoever owns the loop.
    `nominal_count` is about what the losses of a step count; by default the recipe's samples or tokens.

    Call on every rank.
    """
    model.mesh.watch(recorder.collectives.add)
    model.runner.actions = recorder.action
    loss_scale = LossScale() if model.plan.compute.precision == "fp16" else None
    stepper = Stepper(
        runner=model.runner,
        stores=model.stores,
        optimizer=optimizer,
        mesh=model.mesh,
        seed=recipe.run.seed,
        nominal_count=nominal_count or float(recipe.batch.global_batch_size * (model.blueprint.sequence_length or 1)),
        max_gradient_norm=recipe.optimizer.max_grad_norm,
        loss_scale=loss_scale,
        average=average,
        summing=model.summing,
        techniques=model.techniques,
        recorder=recorder,
        buffers=changing_buffers(model),
        routing=model.routing,
    )
    return TrainingState(model=model, optimizer=optimizer, average=average, loss_scale=loss_scale, stepper=stepper)


def changing_buffers(model: ParallelModel) -> list[Tensor]:
    """Return the buffers that are part of the model's state, which a forward in training may change."""
    buffers: list[Tensor] = []
    for part in model.parts:
        saved = part.module.state_dict(keep_vars=True)
        buffers += [buffer for name, buffer in part.module.named_buffers() if name in saved]
    return buffers


def create_training(
    recipe: Recipe, plan: Plan, blueprint: Blueprint, mesh: Mesh, recorder: Recorder, folder: Path | None = None, *,
    draws: Draws | None = None,
) -> TrainingState:  # fmt: skip
    """Build one rank's share of a training.  Call on every rank with equal arguments; the plan must have been checked.

    `folder` is where the run keeps its files, if there is a run.  `draws` are what `draws_of` says of the same
    blueprint and plan, where it was asked before: finding them takes several forwards.

    Raises:
        RecipeError: an optimizer setting that nothing reads, a group that matches no parameter.
        PlanError: techniques that do not fit this model.
    """
    # Refused before anything is built: a mistake in the recipe must not cost the time of a large model's construction.
    check_group_globs(recipe.optimizer, [n for n, p in blueprint.module.named_parameters() if p.requires_grad])
    check_sparse_tables(recipe.optimizer, sparse_tables(blueprint.module))
    groups: list[OptimizerGroup] = []

    # Groups are formed inside of `parallelize`, once the shapes of the rank's parts are known: buckets hold parameters
    # of one group each.
    def group(shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        groups.extend(group_parameters(recipe.optimizer, shapes))
        return {name: index for index, group_members in enumerate(groups) for name in group_members.names}

    model = parallelize(
        blueprint,
        plan,
        mesh,
        seed=recipe.run.seed,
        group_parameters=group,
        cuts=recipe.optimizer.cuts,
        momentum_decay=recipe.optimizer.betas[0] if recipe.optimizer.name == "adamw" else None,
        gathers_ahead=True,
        num_steps=recipe.run.steps,
        folder=folder,
        draws=draws,
    )
    shards = model.stores.shards
    optimizer = create_optimizer(recipe.optimizer, shards, mesh, groups, plan.data_parallel.frozen_after)
    decay = recipe.optimizer.average_decay
    average = None
    if decay is not None:
        from weft.run.engine._average import WeightAverage  # loaded where a run keeps one

        average = WeightAverage(shards, decay)
    # After optimizer and average, whose states the techniques may move elsewhere.
    for technique in model.techniques:
        technique.begin(shards)
    return begin_training(recipe, model, optimizer, average, recorder)
