"""`session.prepare` with a loss: a model whose whole steps are Weft's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from weft.api.batches.losses import LossOfUser
from weft.api.batches.same_data import facts_of_data
from weft.api.batches.stream import BatchStream, UserBatch, shape_of, without_labels
from weft.api.guards.guards import refuse_wrapped
from weft.api.guards.messages import STEPS
from weft.api.planning.arguments import check_prepared
from weft.api.planning.nets import Nets
from weft.api.planning.planning import Planning, UserLoss
from weft.api.preflight.proof import SessionProof, variables_kept
from weft.api.prepared.models import Models
from weft.api.prepared.prepared_facts import facts_of_prepared, first_batch_of
from weft.api.prepared.state import TrainState
from weft.api.ranks.agreement import check_same_facts
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable, SplitRule
from weft.model.hooks import refuse_given
from weft.run.engine.proof import Prove

Split = Sequence[SplitRule] | Mapping[str, Any]
"""How modules split over the tensor axis: rules, or name → kind."""


@final
@dataclass(frozen=True, slots=True)
class WithLoss:
    """What a session has for it.  Called on every rank."""

    models: Models
    planning: Planning
    nets: Nets
    prove: Prove

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[UserBatch],
        *,
        loss: UserLoss,
        inputs: Mapping[str, str] | None,
        split: Split,
        cut: CutTable | None,
        vocabulary_head: str | None,
        max_grad_norm: float | None,
        batch_size: int | None,
    ) -> TrainState:
        """See `Session.prepare`."""
        planning, several = self.planning, self.planning.world_size > 1
        with variables_kept(model, loss, optimizer) as put_back:
            check_prepared(model, optimizer, loss, split, cut, vocabulary_head)
            refuse_wrapped(model)
            stream = BatchStream(loader, planning.seed, lambda fields: None, batch_size)
            stream.warn_of_workers()
            self.models.refuse_taken(model)
            refuse_given(model, vocabulary_head, "before prepare")
            data = facts_of_data(stream, planning.seed) if self.nets.data and several else {}
            check_same_facts({**facts_of_prepared(model, optimizer, stream, max_grad_norm), **data}, planning.device)
            recipe = planning.recipe(model, stream.batch_size, max_grad_norm)
            example = first_batch_of(loader)
            blueprint = planning.blueprint(model, inputs, split, cut, vocabulary_head, example)
            return self._begin(recipe, blueprint, optimizer, loader, stream, loss, example, put_back)

    def _begin(
        self,
        recipe: Recipe,
        blueprint: Blueprint,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[UserBatch],
        stream: BatchStream,
        loss: UserLoss,
        example: UserBatch,
        put_back: Callable[[], None],
    ) -> TrainState:
        """Choose the plan, and bring model and optimizer under it."""
        model, planning = blueprint.module, self.planning
        planned = self.models.plan(planning, recipe, blueprint, optimizer, loss, example)
        proving = (self.prove, planning.quiet, recipe, planned.plan, planned.blueprint, planned.mesh, put_back)
        proof = SessionProof.of(*proving, optimizer=optimizer, loss=loss, stream=stream, example=example)
        shape = shape_of(example)
        state = self.models.bring(
            planned,
            LossOfUser(planned.loss, shape, without_labels(model, shape, blueprint.inputs)),
            lambda given: TrainState(given, loader),
            nominal_count=float(recipe.batch.global_batch_size * (blueprint.sequence_length or 1)),
            words=STEPS,
            name="state",
            proof=proof,
        )
        assert isinstance(state, TrainState)
        return state
