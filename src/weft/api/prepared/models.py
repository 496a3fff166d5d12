"""The models of a session: what must be equal on all ranks, whose their parameters are, and how each is brought under
its plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from weft.analysis.blueprint import look_for_blocks
from weft.analysis.facts import facts_of_blueprint
from weft.api.batches.generators import generators_kept
from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import BatchStream, UserBatch
from weft.api.guards.gradients import LossParameters
from weft.api.guards.model_guard import Guard, GuardMessages
from weft.api.planning.first_looks import look_first
from weft.api.planning.session_plan import Planning, UserLoss
from weft.api.planning.settings import SafetyChecks
from weft.api.preflight.proof import SessionProof
from weft.api.prepared.prepared_model import PlannedModel, PreparedModel, PreparedParts, SessionRounds
from weft.api.ranks.calls import RankCalls
from weft.api.ranks.recording import SessionRuns
from weft.api.saving.optimizer import cuts_of, group_indices, settings_of
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import Recipe
from weft.errors import DataError, RecipeError
from weft.model.blueprint import Blueprint
from weft.techniques.core.precision import NARROW, main_dtype


def check_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse dtypes in which plain PyTorch would train, and the plan would not.

    Raises:
        RecipeError: names the first parameter, and what to write.
    """
    precision, main = plan.compute.precision, main_dtype(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if (name := next((name for name, parameter in trained if parameter.is_complex()), None)) is not None:
        if precision not in ("fp32", "fp64"):
            raise RecipeError(
                f"{name} is complex, and torch has no complex numbers of {precision}. Use compute.precision = fp32."
            )
        if cuts_of(optimizer) != "anywhere":
            raise RecipeError(
                f"{name} is complex, and a {type(optimizer).__name__} may look at more than its parts one by one. Keep"
                f" {name} as torch.view_as_real of it and call torch.view_as_complex in the forward, or use an"
                " optimizer such as torch.optim.AdamW."
            )
    if precision not in ("fp32", "fp64"):
        return
    narrow = next(((name, parameter.dtype) for name, parameter in trained if parameter.dtype in NARROW), None)
    if narrow is not None:
        name, kind = narrow[0], str(narrow[1]).removeprefix("torch.")
        short = "bf16" if narrow[1] is torch.bfloat16 else "fp16"
        raise RecipeError(
            f"{name} is {kind} and to be trained, and the plan's precision is {precision}, which would train it"
            f" otherwise than PyTorch does. Give prepare model.float(), or permit {short} (weft.session(permit="
            f'("{short}",)), compute.precision = "{short}"), which computes in {kind} beside weights in fp32.'
        )
    if main is torch.float64 and precision == "fp32":
        name = next(name for name, parameter in trained or model.named_parameters() if parameter.dtype is torch.float64)
        raise RecipeError(
            f"{name} is float64 as most of the model is, and the plan's precision fp32 would round it. Give prepare"
            ' model.float(), or permit fp64 (weft.session(permit=("fp64",)), compute.precision = "fp64").'
        )


def casts_inputs(model: nn.Module, plan: Plan) -> bool:
    """Whether the plan computes in another dtype than the model was given in, so that inputs follow it."""
    return {"fp32": torch.float32, "fp64": torch.float64}.get(plan.compute.precision) != main_dtype(model)


def facts_of_prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, stream: BatchStream, max_grad_norm: float | None
) -> dict[str, str]:
    """Return them by name: data, classes, parameters and the optimizer's settings."""
    facts = {
        "data: the number of samples in the loader": str(stream.num_samples),
        "data: the global batch": str(stream.batch_size),
        "max_grad_norm": str(max_grad_norm),
    }
    return facts | facts_of_model(model, optimizer)


def facts_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Return those of a model, and of its optimizer."""
    kind = type(model).__name__
    facts = {"the class of the model": kind}
    if optimizer is not None:
        facts["the class of the optimizer"] = type(optimizer).__name__
    facts |= {
        f"{kind}.{name}": f"{tuple(p.shape)}, {p.dtype}, {p.requires_grad}" for name, p in model.named_parameters()
    }
    return facts if optimizer is None else facts | settings_of(optimizer)


def first_batch_of(loader: Iterable[UserBatch]) -> UserBatch:
    """Return a loader's first batch; no generator moves.

    Raises:
        DataError: it is an iterator, or yields no batch.
    """
    with torch.random.fork_rng(devices=[]), generators_kept(loader):  # a loader's iterator draws a seed
        is_iterator = iter(loader) is loader
        first = None if is_iterator else next(iter(loader), None)
    if is_iterator:
        raise DataError(
            f"the loader is an iterator ({type(loader).__name__}), which can be gone through only once. Give an"
            " iterable: a DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )
    if first is None:
        raise DataError("the loader yields no batch. Give it data, or a smaller batch size.")
    return first


@final
class Models:
    """The models that a session has prepared. Its questions about a new model are asked on every rank."""

    def __init__(
        self, planning: Planning, calls: RankCalls, runs: SessionRuns, nets: Callable[[], SafetyChecks]
    ) -> None:
        self.planning, self.calls, self._runs, self._nets = planning, calls, runs, nets
        self.rounds = SessionRounds(calls)
        self._number = 0
        self._meshes: dict[MeshPlan, Mesh] = {}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owned: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._states: weakref.WeakValueDictionary[int, PreparedModel] = weakref.WeakValueDictionary()
        self._guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[PreparedModel]:
        return iter([*self._states.values()])

    def restore(self) -> None:
        """Leave every prepared model plain, where the session ends by an error.  Not collective."""
        for guard in [*self._guards.values()]:
            guard.restore()

    def refuse_taken(self, model: nn.Module) -> None:
        """A parameter has one owner: prepared twice, the first would go on training storage that the model has left."""
        taken = [name for name, parameter in model.named_parameters() if id(parameter) in self._owned]
        if taken:
            raise RecipeError(
                f"{len(taken)} parameters of the {type(model).__name__} ({', '.join(taken[:3])}) are in a model that"
                " this session has prepared already. Prepare a model once, or construct it anew."
            )

    def own(self, model: nn.Module) -> None:
        """Take the model's parameters: the session alone updates them from now on."""
        self._owned.update({id(parameter): parameter for parameter in model.parameters()})

    def disown(self, models: Iterable[nn.Module]) -> None:
        """Release parameters: anything may train them from now on."""
        for parameter in (parameter for model in models for parameter in model.parameters()):
            self._owned.pop(id(parameter), None)

    def refuse_foreign_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer that is about to step and holds parameters of a prepared model."""
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
    ) -> PlannedModel:
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
        return PlannedModel(
            recipe=recipe,
            plan=plan,
            blueprint=blueprint,
            mesh=self.mesh(plan),
            optimizer=optimizer,
            groups=groups,
            loss=loss,
        )

    def supervise(self, planned: PlannedModel) -> None:
        """Tell the supervisor of the job, where there is one, what a model with a loss is."""
        if self._runs.supervised is not None and self._number == 0:
            facts = facts_of_blueprint(planned.blueprint, planned.recipe)
            self._runs.supervised.prepared(planned.recipe, facts)

    def bring(
        self,
        planned: PlannedModel,
        loss: LossOfUser,
        make: Callable[[PreparedParts], PreparedModel],
        *,
        nominal_count: float,
        messages: GuardMessages,
        name: str,
        proof: SessionProof | None = None,
    ) -> PreparedModel:
        """Bring a model and its optimizer under the plan; `nominal_count`: see `LossParameters`."""
        model, plan, mesh = planned.blueprint.module, planned.plan, planned.mesh
        self.own(model)
        self._number += 1
        loss_parameters = LossParameters(planned.loss, self._owned, plan, mesh, nominal_count=nominal_count)
        parts = PreparedParts(
            planned=planned,
            loss=loss,
            recorded=self._runs.open(self._number, plan),
            calls=self.calls,
            rounds=self.rounds,
            guard=Guard(model, loss_parameters, messages, watches_edits=self._nets().edits),
            name=name if self._number == 1 else f"(model {self._number}) {name}",
            proof=proof,
        )
        state = make(parts)
        self.optimizers.add(planned.optimizer)
        self.own(state.model)
        self._states[self._number] = state
        self._guards[self._number] = parts.guard
        return state
