"""The models of a session: whose their parameters are, and how each is brought under its plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from weft.analysis.blueprint import look_for_blocks
from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import UserBatch
from weft.api.guards.guards import Guard
from weft.api.guards.loss_parameters import LossParameters
from weft.api.guards.messages import GuardWords
from weft.api.planning.first_looks import look_first
from weft.api.planning.nets import Nets
from weft.api.planning.planning import Planning, UserLoss
from weft.api.preflight.proof import SessionProof
from weft.api.prepared.dtypes import casts_inputs, check_dtypes
from weft.api.prepared.prepared_model import Given, PreparedModel
from weft.api.prepared.rounds import RoundsOfSession
from weft.api.ranks.calls import Calls
from weft.api.ranks.recording import SessionRuns
from weft.api.saving.optimizer import group_indices
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import Recipe
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A model with the plan that it is to be brought under, before anything of it is touched."""

    recipe: Recipe
    plan: Plan
    blueprint: Blueprint
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    groups: dict[str, int]
    loss: UserLoss
    """The loss, which says of itself what looking has found."""


@final
class Models:
    """What a session has prepared.  What is asked here of a new model is asked on every rank."""

    def __init__(self, planning: Planning, calls: Calls, runs: SessionRuns, nets: Callable[[], Nets]) -> None:
        self.planning, self.calls, self._runs, self._nets = planning, calls, runs, nets
        self.rounds = RoundsOfSession(calls)
        self._number = 0
        self._meshes: dict[MeshPlan, Mesh] = {}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owned: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._states: weakref.WeakValueDictionary[int, PreparedModel] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[PreparedModel]:
        return iter([*self._states.values()])

    def refuse_taken(self, model: nn.Module) -> None:
        """A parameter has one owner: prepared twice, the first would go on training storage that the model has left."""
        taken = [name for name, parameter in model.named_parameters() if id(parameter) in self._owned]
        if taken:
            raise RecipeError(
                f"{len(taken)} parameters of the {type(model).__name__} ({', '.join(taken[:3])}) are in a model that"
                " this session has prepared already. Prepare a model once, or construct it anew."
            )

    def own(self, model: nn.Module) -> None:
        """From now on the model's parameters are the session's to update."""
        self._owned.update({id(parameter): parameter for parameter in model.parameters()})

    def disown(self, models: Iterable[nn.Module]) -> None:
        """From now on they may be trained by anything."""
        for parameter in (each for model in models for each in model.parameters()):
            self._owned.pop(id(parameter), None)

    def refuse_foreign_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Of every optimizer that is about to step: refuse one that holds parameters of a prepared model."""
        if optimizer in self.optimizers:
            return  # refuses by itself, outside a step
        prepared = {id(parameter) for state in self for parameter in state.model.parameters()}
        prepared.update(self._owned.keys())
        if any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"]):
            raise RecipeError(
                f"this {type(optimizer).__name__} holds parameters of a model that session.prepare was given with"
                " another optimizer: its update would be lost with the next step. Give prepare one optimizer with a"
                " parameter group for each setting."
            )

    def mesh(self, plan: Plan) -> Mesh:
        """The process groups of a plan, made once.  Call on every rank."""
        if plan.mesh not in self._meshes:
            made = Mesh(plan.mesh, self.planning.device, timeout_seconds=self.planning.timeout_seconds)
            self._meshes[plan.mesh] = made
        return self._meshes[plan.mesh]

    def plan(
        self,
        planning: Planning,
        recipe: Recipe,
        blueprint: Blueprint,
        optimizer: torch.optim.Optimizer,
        loss: UserLoss,
        example: UserBatch,
    ) -> Planned:
        """Look at a model and choose its plan."""
        model = blueprint.module
        if planning.plan is not None:  # what is chosen here shares out data alone
            look_for_blocks(blueprint, planning.plan)
        looks = look_first(blueprint, loss, example, planning.plan, self._nets(), planning.device)
        loss = looks.declared(loss)
        plan = planning.choose(recipe, blueprint, loss, example, looks)
        groups = group_indices(optimizer, model)
        check_dtypes(model, optimizer, plan)
        blueprint = replace(blueprint, casts_inputs=casts_inputs(model, plan))
        return Planned(
            recipe=recipe,
            plan=plan,
            blueprint=blueprint,
            mesh=self.mesh(plan),
            optimizer=optimizer,
            groups=groups,
            loss=loss,
        )

    def bring(
        self,
        planned: Planned,
        loss: LossOfUser,
        make: Callable[[Given], PreparedModel],
        *,
        nominal_count: float,
        words: GuardWords,
        name: str,
        proof: SessionProof | None = None,
    ) -> PreparedModel:
        """Bring a model and its optimizer under the plan; `nominal_count`: see `LossParameters`."""
        model, plan, mesh = planned.blueprint.module, planned.plan, planned.mesh
        self.own(model)
        self._number += 1
        held = LossParameters(planned.loss, self._owned, plan, mesh, nominal_count=nominal_count)
        given = Given(
            recipe=planned.recipe,
            plan=plan,
            blueprint=planned.blueprint,
            mesh=mesh,
            optimizer=planned.optimizer,
            groups=planned.groups,
            loss=loss,
            recorded=self._runs.open(self._number, plan),
            calls=self.calls,
            rounds=self.rounds,
            guard=Guard(model, held, words, watches_edits=self._nets().edits),
            name=name if self._number == 1 else f"(model {self._number}) {name}",
            proof=proof,
        )
        state = make(given)
        self.optimizers.add(planned.optimizer)
        self.own(state.model)
        self._states[self._number] = state
        return state
