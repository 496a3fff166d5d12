"""Refuse the use of a prepared model, its parameters and its optimizer where it would do nothing or do harm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from weft.api.guards.edits import OptimizerTensor, ParameterEdits
from weft.api.guards.gradients import LeftGradients, LossParameters
from weft.api.guards.plain_model import PlainModel
from weft.api.guards.state_checks import FixedNorms
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError, RecipeError
from weft.events import StepEvent
from weft.techniques.build import ParallelModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardMessages:
    """Errors: each says what would be wrong, and the line to write."""

    step: str
    """Error of the optimizer's own step."""
    backward: str
    """Error of a backward that reaches the model outside a step."""
    forward: str
    """Error of a forward that would lead to such a backward, where weights are gathered for each."""
    untrained: str
    """Error of a step while gradients are switched off."""
    optimizer_state: str
    optimizer_load: str
    model_state: str
    model_load: str


_WRITE = "Write `state.step(batch)` in place of the forward, loss.backward(), clipping and optimizer.step()"
STEPS = GuardMessages(
    step="optimizer.step() of an optimizer that session.prepare was given would change no weight: gradients are reduced"
    f" and applied by the session. {_WRITE}.",
    backward="backward() has reached parameters of a model that session.prepare was given, outside its step: this"
    f" gradient would be lost. {_WRITE}; where the model is the fixed side of another's loss, write it inside `with"
    " state.frozen():`; where only its outputs are wanted, inside `with torch.no_grad():`.",
    forward="a forward outside a step records gradients, which this plan (ZeRO-3) would lose. Write"
    " `state.step(batch)` in place of the forward, loss.backward(), clipping and optimizer.step(); where only outputs"
    " are wanted, call the model inside `with torch.no_grad():`; as the fixed side of another model's loss inside"
    " `with state.frozen():`.",
    untrained="state.step() was called inside torch.no_grad() or torch.inference_mode(), where nothing can train. Call"
    " it outside; state.evaluate(loader) is for losses alone.",
    optimizer_state="optimizer.state_dict() would hold this rank's share of the states only. Write `state.save()`,"
    " which saves model, optimizer and place in the data for any plan.",
    optimizer_load="optimizer.load_state_dict() cannot fill this rank's share of the states. Write `state.load(path)`"
    " for what state.save() has written.",
    model_state="this plan cuts the model, so state_dict() and save_pretrained() would hold this rank's share of the"
    " weights only. Write `state.export(folder)` on every rank: it writes the whole model, as transformers loads it.",
    model_load="load_state_dict() after session.prepare would be lost with the next step: the weights that train lie"
    " elsewhere. Load before prepare, or write `state.load(path)` for what state.save() has written.",
)
"""Words for a loop whose steps are `state.step` and `state.manual_step`."""

_STATE = "state = session.state(model)"
OWN_STEPS = GuardMessages(
    step="optimizer.step() was reached past the object that session.prepare was given. Call it as"
    " `optimizer.step()` of that object.",
    backward="backward() has reached a model that session.prepare was given by itself, so that its gradient would not"
    " be weighted by this rank's samples. Write `session.backward(loss)` in place of `loss.backward()`; where only the"
    " model's outputs are wanted, call it inside `with torch.no_grad():`.",
    forward="a forward after session.close() records gradients that nobody would reduce. Call the model before, or"
    " inside `with torch.no_grad():`.",
    untrained="session.backward() was called inside torch.no_grad() or torch.inference_mode(), where nothing can"
    " train. Call it outside.",
    optimizer_state="optimizer.state_dict() would hold this rank's share of the states only. Write"
    " `session.save(folder)`, which saves all that was prepared for any plan.",
    optimizer_load="optimizer.load_state_dict() after the model's first forward cannot fill this rank's share of the"
    " states. Write `session.load(folder)` for what session.save() has written.",
    model_state="this plan cuts the model, so state_dict() and save_pretrained() would hold this rank's share of the"
    f" weights only. Write `{_STATE}` and `state.export(folder)` on every rank: it writes the whole model, as"
    " transformers loads it.",
    model_load="load_state_dict() after the model's first forward would be lost with the next step: the weights that"
    " train lie elsewhere. Load before it, or write `session.load(folder)` for what session.save() has written.",
)
"""Words for a loop that keeps its own forward, loss and optimizer.step()."""


class MovedParameter(nn.Parameter):
    """A parameter that the model has left: whoever still holds it hears so when it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RecipeError(
            "this is a parameter as it was before session.prepare: under the plan the model holds its share in another"
            " object. Take parameters (for an average, a norm, another optimizer) from state.model.parameters() after"
            " prepare."
        )

    def __repr__(self, **_: Any) -> str:  # a debugger may look
        return "MovedParameter()"


class Guard:
    """Tracks whether a model's step is under way, and refuses calls that only make sense inside one."""

    def __init__(
        self, model: nn.Module, loss_parameters: LossParameters, messages: GuardMessages, *, watches_edits: bool = True
    ) -> None:
        """`model` is as the user gave it."""
        self._messages = messages
        self._loss_parameters = loss_parameters
        self._plain: PlainModel | None = PlainModel(model)
        self._depth = 0
        self._watches_edits = watches_edits
        self._edits: ParameterEdits | None = None
        self._is_manual = False
        self.is_closed = False
        """Whether the model takes no more steps."""
        self.on_restore: list[Callable[[], None]] = []
        """Called once when the model is left plain, before the guard removes its own hooks."""
        self._norms: FixedNorms | None = None
        self._handles: list[RemovableHandle] = []
        self.refused_backward = False
        """Whether a backward outside a step was refused half way, since somebody last set this back."""

    @contextmanager
    def inside(self) -> Generator[None]:
        """Enter Weft's own work. Writes of the loop into the weights until then are taken over first."""
        if not self._depth and self._edits is not None:
            self._edits.settle(gathered=self._is_manual)
        try:
            with self.within():
                yield
        finally:
            if not self._depth and self._edits is not None:
                self._edits.note(gathered=self._is_manual)

    @contextmanager
    def within(self) -> Generator[None]:
        """Enter work of Weft that neither reads nor writes weights that stay: nothing is taken over."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def manual(self) -> Generator[None]:
        """A step whose forwards and backwards the loop writes."""
        self.set_manual(True)
        try:
            yield
        finally:
            self.set_manual(False)

    def set_manual(self, is_manual: bool) -> None:
        """Such a step begins, or has ended."""
        self._is_manual = is_manual

    def refuse_within_manual(self, call: str) -> None:
        """Raises `RecipeError` inside a manual step of the same model."""
        if self._is_manual:
            raise RecipeError(
                f"{call} was called inside a manual step of the same model, whose gradients and weights it would change"
                " under way. Leave the block first."
            )

    def check_ready(self, call: str, model: nn.Module, frozen: Iterable[str], left: LeftGradients | None) -> None:
        """Refuse a step that cannot be taken, or that would hide a mistake made since the last one.

        Raises:
            RecipeError: the model is closed or in a manual step, cannot train, or its gradients were changed.
        """
        self._hush()
        if self.is_closed:
            raise RecipeError(
                f"{call} was called after close(), and what is closed takes no more steps. Take them before, or prepare"
                " the model again in a new session."
            )
        self.refuse_within_manual(call)
        refuse_untrainable(model, frozen, self._messages.untrained)
        if self._norms is not None:
            self._norms.check()
        if left is not None and not self.refused_backward:  # which has left a part of itself
            left.check()
        self._loss_parameters.begin()

    @property
    def loss_parameters(self) -> LossParameters:
        """The watch over parameters that the loss holds."""
        return self._loss_parameters

    def after_step(self, event: StepEvent) -> None:
        """A step is through.  Call on every rank."""
        self._loss_parameters.end(event)
        self.refused_backward = False

    @property
    def is_inside(self) -> bool:
        return self._depth > 0

    def watch(
        self,
        model: ParallelModel,
        before: Mapping[str, nn.Parameter],
        recipe: Recipe,
        of_optimizer: Sequence[OptimizerTensor],
        *,
        gathers: bool,
    ) -> None:
        """Begin to refuse what does nothing or does harm from now on.

        Args:
            before: parameters that the model had before its plan.
            of_optimizer: what the optimizer's parameter groups hold.
            gathers: whether weights are gathered for each forward.
        """
        parts = [part.module for part in model.parts]
        retire(before, *parts)
        trained = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
        self.watch_gradients(() if gathers else trained, parts[:1] if gathers else ())
        self.watch_state(parts[0], model.plan)
        self._norms = FixedNorms(parts, model.blueprint, model.plan, recipe)
        if self._watches_edits and not model.plan.memory.offloads_parameters:  # which come and go by themselves
            self._edits = ParameterEdits(model.parts, model.stores, model.plan, of_optimizer)
            if self._edits.has_parts and model.plan.mesh.pipeline == 1:  # a stage is called by its schedule alone
                root = model.parts[0].module
                self._handles.append(root.register_forward_pre_hook(self._hush, prepend=True))
                self._handles.append(root.register_forward_hook(self._listen_again, always_call=True))

    def facts(self) -> dict[str, str]:
        """Return facts about the loop's writes into the weights since the last step that must be equal on all ranks."""
        return {} if self._edits is None else self._edits.take_facts()

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the optimizer's own `step`, `state_dict` and `load_state_dict`."""
        optimizer.register_step_pre_hook(self._refusal(self._messages.step))
        optimizer.register_state_dict_pre_hook(self._refusal(self._messages.optimizer_state))
        optimizer.register_load_state_dict_pre_hook(self._refusal(self._messages.optimizer_load))

    def watch_gradients(self, parameters: Iterable[nn.Parameter], roots: Iterable[nn.Module]) -> None:
        """Refuse a backward outside a step into `parameters`; where these are gathered for each forward, a forward of
        `roots` that would lead to one."""
        for parameter in parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._refuse_backward))
        for root in roots:
            self._handles.append(root.register_forward_pre_hook(self._refuse_forward, prepend=True))
            self._handles.append(root.register_forward_hook(self._drop_gathered))

    def restore(self) -> None:
        """Leave the model plain, so that it may be prepared again in another session.  Not collective.

        The optimizer stays refused: it holds none of the model's parameters any more.
        """
        while self.on_restore:
            self.on_restore.pop()()
        while self._handles:
            self._handles.pop().remove()
        if self._edits is not None:
            self._edits.restore()
            self._edits = None
        self._loss_parameters.restore()
        if self._plain is not None:
            self._plain.put_back()
            self._plain = None

    def watch_state(self, model: nn.Module, plan: Plan) -> None:
        """Refuse `state_dict` (and so `save_pretrained`) where a rank holds a part of the model only, and
        `load_state_dict` where weights are copies of what trains."""
        mesh = plan.mesh
        is_cut = mesh.tensor > 1 or mesh.pipeline > 1 or plan.data_parallel.shards_weights
        self._plain = None if is_cut else self._plain
        for module in model.modules() if is_cut else ():
            module.register_state_dict_pre_hook(self._refusal(self._messages.model_state))
        if is_cut or plan.compute.precision in ("bf16", "fp16"):
            model.register_load_state_dict_pre_hook(self._refusal(self._messages.model_load))

    def _refuse_backward(self, *_: Any) -> None:
        if not self._depth:
            self.refused_backward = True
            raise RecipeError(self._messages.backward)

    def _refuse_forward(self, root: nn.Module, *_: Any) -> None:
        """Refuse before anything is gathered: a backward that is given up half way would leave its gathers behind."""
        if self.is_inside or self._is_manual:
            return
        if torch.is_grad_enabled() and any(p.requires_grad for p in root.parameters()):
            raise RecipeError(self._messages.forward)

    def _drop_gathered(self, *_: Any) -> None:
        """Drop gathered weights after a forward of the loop's own: writes into them would be lost."""
        if not self.is_inside and not self._is_manual and not torch.is_grad_enabled() and self._edits is not None:
            self._edits.release()

    def _hush(self, *_: Any) -> None:
        """Stop watching while Weft or the model itself works with parameters."""
        if self._edits is not None:
            self._edits.watch(False)

    def _listen_again(self, *_: Any) -> None:
        """Watch again after a forward of the loop's own, which reads weights as a step does."""
        if not self.is_inside and not self._is_manual and self._edits is not None:
            self._edits.watch(True)

    def _refusal(self, reason: str) -> Callable[..., None]:
        """A hook that raises for `reason` outside a step."""

        def check(*_: Any) -> None:
            if not self.is_inside:
                raise RecipeError(reason)

        return check


_WRAPPERS: Mapping[str, tuple[str, str]] = {
    "DistributedDataParallel": ("model.module", "Weft reduces the gradients"),
    "DataParallel": ("model.module", "Weft shares the batch out"),
    "FullyShardedDataParallel": ("the model as it was before", "the plan shards it (data_parallel.zero = 3)"),
    "OptimizedModule": ("the model as it was before torch.compile", "plan.compute.compile = true compiles its blocks"),
}
"""Classes that wrap a model → what to give instead, and why."""


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that something else has wrapped, sharded or compiled already.

    Raises:
        RecipeError: it is so wrapped; the line to write is named.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS and type(module).__module__.startswith("torch."):
            instead, why = _WRAPPERS[kind]
            where = f"{name} is" if name else "the model is"
            raise RecipeError(
                f"{where} wrapped in {kind}. Give session.prepare {instead}: {why}. Create the optimizer over its"
                " parameters, too."
            )
    sharded = next((name for name, value in model.named_parameters() if isinstance(value, DTensor)), None)
    if sharded is not None:
        raise RecipeError(
            f"{sharded} is a DTensor: the model is sharded already (fully_shard, parallelize_module). Give"
            " session.prepare the model as it was before; the plan shards it (data_parallel.zero = 3, mesh.tensor)."
        )


def refuse_untrainable(model: nn.Module, frozen: Iterable[str], untrained: str) -> None:
    """Refuse a step that could not train what the loop means to: the parameters named `frozen` were so at `prepare`.

    Raises:
        RecipeError: gradients are switched off, or one of these wants a gradient now.
    """
    if not torch.is_grad_enabled():
        raise RecipeError(untrained)
    for name in frozen:
        try:
            thawed = model.get_parameter(name).requires_grad
        except AttributeError:
            continue  # another stage's
        if thawed:
            raise RecipeError(
                f"{name} was frozen when session.prepare was given the model, and wants a gradient now: it would never"
                " change. Prepare the model with all that is to be trained at any time, and freeze it by"
                " requires_grad_(False) after prepare, until its time has come."
            )


@contextmanager
def frozen(plan: Plan, modules: Iterable[nn.Module]) -> Generator[None]:
    """The modules without gradients for their parameters.

    Raises:
        PlanError: under a pipeline, where no rank has the whole model.
    """
    if plan.mesh.pipeline > 1:
        raise PlanError(
            f"the plan cuts the model into {plan.num_stages} stages, so that no rank can run it inside another"
            " model's loss. Use mesh.pipeline = 1."
        )
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def retire(before: Mapping[str, nn.Parameter], *parts: nn.Module) -> None:
    """Make parameters that the model has no more raise an error where somebody still uses them."""
    kept = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in before.values():
        if id(parameter) not in kept and type(parameter) is nn.Parameter:
            parameter.data = torch.empty(0)
            parameter.__class__ = MovedParameter
