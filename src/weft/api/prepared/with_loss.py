"""`session.prepare` with a loss: what is checked and looked at before the model is brought under its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import (
    BatchStream,
    UserBatch,
    facts_of_data,
    shape_of,
    without_labels,
)
from weft.api.guards.model_guard import STEPS, refuse_wrapped
from weft.api.planning.arguments import check_prepared
from weft.api.planning.session_plan import Planning, UserLoss
from weft.api.planning.settings import SafetyChecks
from weft.api.preflight.proof import SessionProof, variables_kept
from weft.api.prepared.models import Models, facts_of_prepared, first_batch_of
from weft.api.prepared.state import TrainState
from weft.api.ranks.agreement import check_same_facts
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.families._tables import CutTable, SplitRule
from weft.model.hooks import refuse_given
from weft.run.engine.proof import ProveMode

Split = Sequence[SplitRule] | Mapping[str, Any]
"""How modules split over the tensor axis: rules, or name → kind."""


@final
@dataclass(frozen=True, slots=True)
class ModelWithLoss:
    """A session's parts for a model with a loss. Called on every rank."""

    models: Models
    planning: Planning
    nets: SafetyChecks
    prove: ProveMode

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
            stream = BatchStream(loader, planning.seed, lambda digest: None, batch_size)
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
        self.models.supervise(planned)
        state = self.models.bring(
            planned,
            LossOfUser(planned.loss, shape, without_labels(model, shape, blueprint.inputs)),
            lambda parts: TrainState(parts, loader),
            nominal_count=float(recipe.batch.global_batch_size * (blueprint.sequence_length or 1)),
            messages=STEPS,
            name="state",
            proof=proof,
        )
        assert isinstance(state, TrainState)
        return state
