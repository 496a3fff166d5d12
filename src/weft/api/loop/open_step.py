"""Steps that a loop writes as in plain PyTorch: its own forward, loss, optimizer.step() and zero_grad()."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.api.batches.sharded_loader import HandedBatch, LoaderSharing
from weft.api.guards.gradients import WatchedGradients
from weft.api.guards.model_guard import OWN_STEPS
from weft.api.prepared.prepared_model import PreparedModel, PreparedParts
from weft.api.saving.export import gather_weights
from weft.api.saving.optimizer_states import PlainStates
from weft.api.saving.saves import Saves
from weft.config.document import Json
from weft.errors import DataError, RecipeError
from weft.events import CheckpointEvent
from weft.run.engine import ReducedGradients
from weft.techniques.core import CheckpointShard, LossTotals, MicrobatchState
from weft.techniques.core.own_forwards import OwnForwards

_EARLY_STEPS, _REPORT_SECONDS = 4, 0.1
_CHANGED = (
    "between backward and optimizer.step(), as torch.nn.utils.clip_grad_norm_ does",
    "Clip by session.clip_grad_norm_(model, 1.0), whose norm is that of the whole gradient; scale the loss in place of"
    " its gradient; clear gradients by optimizer.zero_grad().",
)
SCHEDULED = "_wrapped_by_lr_sched"
"""Attribute by which a scheduler knows an optimizer's step that tells of itself."""


@final
class OpenModel(PreparedModel):
    """A model whose loop calls it, and its optimizer, as it would without Weft.

    A step is open from the first forward or backward behind `optimizer.step()` to the next `optimizer.step()`, which
    reduces what the backwards between have added, and updates.  `zero_grad()`, of the optimizer or the model, forgets
    it, as it does in plain PyTorch.
    """

    def __init__(self, parts: PreparedParts, sharing: LoaderSharing) -> None:
        gathers = parts.planned.plan.data_parallel.shards_weights
        self.size = (
            0 if gathers else sum(parameter.numel() for parameter in parts.planned.blueprint.module.parameters())
        )
        """Elements whose gradients are reduced in buckets; the same on all ranks."""
        super().__init__(parts, nominal_count=1.0)
        self._guard.on_restore.append(self._put_back)
        self._sharing = sharing
        self._plain_states = PlainStates(self.optimizer, self._optimizer.runs, parts.planned.groups)
        part = self._parallel.parts[0]
        dtype = self._parallel.dtypes.compute if self._blueprint.casts_inputs else None
        gathers = self.plan.data_parallel.shards_weights and self._mesh.size("shard") > 1
        # Else parameters refuse such a backward, and one that differentiates by the inputs alone goes on.
        self._forwards = OwnForwards(part, dtype, self._refuse if gathers else lambda: None)
        self._exchanges = gathers or bool(self._blueprint.has_batch_norm)
        self._handles = [
            *self._forwards.watch(),
            part.module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
        ]
        if (draws := sharing.draws) is not None:
            self._handles += [
                part.module.register_forward_pre_hook(draws.enter, prepend=True),
                part.module.register_forward_hook(draws.leave, always_call=True),
            ]
        self._watched = WatchedGradients(part.module, *_CHANGED) if self._mesh["world"].size > 1 else None
        self._batch: HandedBatch | None = None
        """The batch that keys the draws of forwards."""
        self._offset = 0
        """Samples that the step took before those."""
        self._rows: int | None = None
        self._is_open = self._has_gradients = self._has_old = self._was_last = False
        self._zeros = frozenset[str]()
        """Parameters whose gradients are zeros where the loop asked for that, and which had one before."""
        self._made = self._last_made = self._usual = 0
        """Backwards since the last step, before that, and before each of the last two steps."""
        self._scale = 1.0
        self._totals = LossTotals.empty(self._mesh.device)
        self._counted: HandedBatch | None = None
        self._samples = 0
        """Samples of the global batches whose losses the step has."""
        self._reduced: ReducedGradients | None = None
        self._reported = 0.0
        self._methods = ReplacedMethods()
        self._replace_methods(part.module)

    # ── forwards ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._guard.is_inside or self._guard.is_closed:
            return
        if torch.is_grad_enabled() and not self._is_open:
            self._open()
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        rows = leaves[0].shape[0] if leaves else 0
        # A loop may take several batches before it trains on the first: tensors tell which one this forward has.
        self._sharing.turn_to(leaves, trains=module.training and torch.is_grad_enabled())
        batch = self._sharing.last
        if batch is None and rows != self._rows:
            self._rows = rows
            start = self._mesh.data_index * rows
            self._key(torch.arange(start, start + rows))
        elif batch is not None and batch is not self._batch:
            # Samples of several batches in one step have ids of their own, so that dropout differs between them.
            self._offset += 0 if self._batch is None else self._batch.size
            self._batch = batch
            own = torch.arange(batch.start, batch.stop) + self._offset
            self._key(own if len(own) else torch.zeros(1, dtype=torch.int64))
        if batch is not None and batch.has_fillers and module.training and self._blueprint.batch_norm:
            raise DataError(
                f"the batch has {batch.size} samples, too few for every data rank to have one, and"
                f" {self._blueprint.batch_norm} takes the statistics of the whole batch. Let batches have a sample for"
                " each rank (drop_last=True)."
            )

    def _key(self, ids: Tensor) -> None:
        own = ids.to(self._mesh.device, non_blocking=True)
        seed = self._recipe.run.seed
        self._forwards.take(MicrobatchState(seed=seed, step=self._steps, sample_ids=own, sequence_length=None))

    def _open(self) -> None:
        self._check_ready("session.backward()")
        if self._has_old and self._is_cleared():
            self._has_old = False
        self._scale = self._training.stepper.begin(self._steps, seeds=False)
        self._guard.set_manual(True)
        self._is_open = True
        self._forget()
        self._batch, self._rows, self._offset = None, None, 0

    def _forget(self) -> None:
        self._has_gradients = self._was_last = False
        self._totals = LossTotals.empty(self._mesh.device)
        self._counted, self._samples, self._reduced = None, 0, None
        if self._watched is not None:
            self._watched.note()

    def _is_cleared(self) -> bool:
        """Whether the loop has cleared the last step's gradients by hand."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return not any(bool(gradient.any()) for gradient in gradients if gradient is not None)

    # ── backwards ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_reachable(self) -> bool:
        """Whether a backward may come to the model."""
        return not self._guard.is_closed

    @property
    def scale(self) -> float:
        """Factor of losses against underflow in fp16."""
        return self._scale

    @property
    def expects_last(self) -> bool:
        """Whether the coming backward is likely the step's last: the two steps before had as many."""
        return self._usual == self._made + 1 and self._parallel.stores.takes_back

    @contextmanager
    def backward(self, addend: Tensor, *, retain_graph: bool, is_last: bool) -> Generator[None]:
        """The backward of a loss within: `addend` is its part in the mean over the step's samples.

        In one that `is_last` reductions begin; where it was not, they are taken back.
        """
        if not self._is_open:
            self._open()
        self._check_untouched()
        stores = self._parallel.stores
        if self._reduced is not None or (self._was_last and not stores.takes_back):
            raise RecipeError(
                "session.backward() came after the gradients of this step were reduced over the ranks, by"
                " session.clip_grad_norm_ or a backward that was said to be the last. Make all backwards of a step"
                " first, or call optimizer.zero_grad() to begin anew."
            )
        self._made += 1
        self._go_on_behind_last()
        stores.on_backward(0, 0)  # ZeRO-3 reduces in every backward: nobody knows which is the last
        if is_last:
            stores.on_microbatch(0)
            stores.on_last_forward(0)
        called = self._calls.call("session.backward()") if self._exchanges else nullcontext()
        # Weights that are gathered are let go within; others stay, and what was written into them is the step's to see.
        aside = self._guard.inside() if self.plan.data_parallel.shards_weights else self._guard.within()
        with called, aside, self._forwards.own_backward(retain_graph):
            yield
        if is_last:  # also where the loss did not come here: on another rank it may have
            stores.on_last_backward(0)
            self._was_last = True
        self._take(addend)
        if self._watched is not None:
            self._watched.note()

    def _go_on_behind_last(self) -> None:
        """Take reductions back that were begun too early, or of which no step is made."""
        if self._was_last:
            self._parallel.stores.take_back()
            self._was_last = False
            if self._watched is not None:
                self._watched.note()

    def _take(self, addend: Tensor) -> None:
        """Count a loss whose backward has come here."""
        # A loss that does not depend on this model is another model's.
        if not self._forwards.reached and not self._is_used():
            return
        self._has_gradients = True
        self._totals.sum += addend.detach()
        batch = self._sharing.last
        if batch is None:
            self._samples += (self._rows or 1) * self.plan.mesh.data
        # Several losses of one batch count its samples once.
        elif batch is not self._counted:
            self._samples += batch.size
        self._counted = batch

    def _is_used(self) -> bool:
        """Whether a parameter has had a gradient, though no output of the forward was seen that leads to it."""
        stores = self._parallel.stores
        return not self._has_gradients and len(stores.unused()) < len(stores.names())

    def _check_untouched(self) -> None:
        if self._watched is not None:
            self._watched.check()

    # ── the optimizer's methods ───────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Take the step of `optimizer.step()`."""
        if self._has_old:
            again = "a second optimizer.step() would" if not self._has_gradients else "this optimizer.step() would"
            raise RecipeError(
                f"{again} add the gradients of the last step to its own, as nothing has cleared them since. Call"
                " optimizer.zero_grad() once in every step, before its backward or after its optimizer.step()."
            )
        if unreached := sorted(self._zeros & self._parallel.stores.unused()):
            raise RecipeError(
                f"zero_grad(set_to_none=False) has left zeros as the gradients of {len(unreached)} parameters that no"
                f" backward of this step has reached ({', '.join(unreached[:3])}), by which optimizer.step() would move"
                " them (weight decay, momentum); a session leaves such alone. Call zero_grad() without it."
            )
        if not self._has_gradients:
            return  # plain PyTorch leaves parameters without gradients alone
        gathers = self.plan.data_parallel.shards_weights
        # Under ZeRO-3 gathered weights are released between the reduction and the update: two looks.
        with self._guard.inside() if not gathers else nullcontext():  # one look for both
            reduced = self.reduced("optimizer.step()")
            self._guard.set_manual(False)
            with self._calls.call("optimizer.step()", facts=lambda: self._facts), self._guard.inside():
                rate = float(self.optimizer.param_groups[0]["lr"])
                event = self._training.stepper.apply(reduced, step=self._steps, learning_rate=rate)
        self._is_open, self._has_old, self._reduced = False, True, None
        self._note(replace(event, count=float(self._samples)), self._samples)
        self._usual = self._made if self._made == self._last_made else 0
        self._last_made, self._made = self._made, 0
        self._has_gradients = False

    def _replace_methods(self, module: nn.Module) -> None:
        plain = self.optimizer.step

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._guard.is_inside or self._guard.is_closed:
                return plain() if closure is None else plain(closure)
            refuse_closure(closure)
            return self.step()

        if hasattr(plain, SCHEDULED):
            setattr(step, SCHEDULED, True)

        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self.zero_grad(leaves_zeros=not set_to_none)

        def state_dict(_: torch.optim.Optimizer) -> dict[str, Any]:
            return self.optimizer_state()

        def load_state_dict(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            self.load_optimizer_state(state_dict)

        own: dict[str, Any] = {"state_dict": state_dict, "load_state_dict": load_state_dict, "zero_grad": zero_grad}
        self._methods.put(self.optimizer, step=step, **own)
        self._methods.put(module, zero_grad=zero_grad)

    def optimizer_state(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` returns: as without Weft, where every rank has all of each parameter.

        Raises:
            RecipeError: it has not.
        """
        with self._guard.within():
            return self._plain_states.full(OWN_STEPS.optimizer_state)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """What `optimizer.load_state_dict()` does, with a state of whole parameters, on every rank alike."""
        with self._guard.within():
            self._plain_states.take(state)

    def zero_grad(self, *, leaves_zeros: bool = False) -> None:
        """Clear gradients for `zero_grad()` of optimizer and model."""
        stores = self._parallel.stores
        self._zeros = self._zeros | (stores.names() - stores.unused()) if leaves_zeros else frozenset[str]()
        self._has_old = False
        self._go_on_behind_last()
        if self._is_open and self._has_gradients:
            self._parallel.stores.begin_step()
            self._forget()

    def reduced(self, who: str) -> ReducedGradients:
        """Reduce the gradients, once in a step, and agree with the other ranks."""
        if self._reduced is None:
            self._check_untouched()
            if self._mesh.data_index == self._first_of_replica:
                self._totals.count += 1.0
            with self._calls.call(who, facts=lambda: self._facts), self._guard.inside():
                self._facts = self._settings()  # with what the loop was found to have written
                agreement = self._agreement()
                self._reduced = self._training.stepper.reduce(
                    self._totals, fingerprint=agreement["fingerprint"], on_difference=agreement["on_difference"]
                )
        return self._reduced

    @property
    def _first_of_replica(self) -> int:
        mesh = self.plan.mesh
        alone = self.plan.data_parallel.replicas_step_alone
        return self._mesh.data_index // mesh.shard * mesh.shard if alone else 0

    def gradient_norm(self) -> float:
        """The norm of the step's gradients, which are reduced for that."""
        return self.reduced("session.clip_grad_norm_()").norm if self._has_gradients else 0.0

    def scale_gradients(self, factor: float) -> None:
        """Take the step's gradients times a factor."""
        if self._reduced is not None:
            self._reduced.scaled(factor)

    @torch.no_grad()
    def clip_value(self, limit: float) -> None:
        """Clip each element of the step's gradients."""
        if not self._has_gradients:
            return
        reduced = self.reduced("session.clip_grad_value_()")
        for shard in self._parallel.stores.shards:
            if shard.gradient is not None:
                shard.gradient.mul_(reduced.factor).clamp_(-limit, limit)
        reduced.scaled(1.0 / reduced.factor)

    # ── the run ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _data_facts(self) -> dict[str, str]:
        draws, shared = self._sharing.draws, self._sharing.shared
        facts = {"data: what session.share was given": shared} if shared else {}
        if draws is None or not draws.has_drawn:
            return facts
        return {**facts, "where torch's generator stands, from which the loop draws,": draws.digest()}

    def load(self, path: Any = None) -> int:
        """See `PreparedModel.load`."""
        self.leave_step("state.load()")
        return super().load(path)

    def written(self) -> tuple[dict[str, Json], list[CheckpointShard]]:
        """Return what `save` writes, for a save of several models."""
        with self._guard.inside():
            return self._saves.written(self._steps, self._place(), self.optimizer)

    @contextmanager
    def loading(self) -> Generator[Saves]:
        """Fill the model within, from the save of several models."""
        self._guard.refuse_within_manual(f"{self._name}.load()")
        with self._guard.inside(), self._saves.loading():
            yield self._saves

    def loaded(self, state: Mapping[str, Json]) -> None:
        """Go on where a save was made, whose model was filled."""
        self._loaded(state)

    def note_save(self, path: Path, seconds: float) -> None:
        """Record a save of several models, of which this is one."""
        self._run.emit(CheckpointEvent(step=self._steps, path=str(path), seconds=seconds))

    def leave_step(self, call: str) -> None:
        """Be outside of a step, for a load."""
        if self._has_gradients:
            raise RecipeError(
                f"{call} was called between a backward and its optimizer.step(), whose gradients are of the weights"
                " before it. Call it before the backward, or optimizer.zero_grad() first."
            )
        self._go_on_behind_last()
        self._guard.set_manual(False)
        self._is_open = False

    def gathered_weights(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Tensor]:
        """The whole model's state, see `Session.weights`."""
        plan = self.plan
        if not (plan.mesh.tensor > 1 or plan.data_parallel.shards_weights):
            self._parallel.stores.wait_weights()
            return dict(self.model.state_dict())
        with self._calls.call("the gathering of weights", meets=True), self._guard.inside():
            weights = gather_weights(self._training.weights(), all_gather)
        return weights if self._mesh["world"].index == 0 else {}

    def _reports_now(self) -> bool:
        """Not behind each of many short steps: to read the memory of a process takes a part of one."""
        now = time.monotonic()
        if self._steps > _EARLY_STEPS and now - self._reported < _REPORT_SECONDS:
            return False
        self._reported = now
        return True

    def _put_back(self) -> None:
        """Remove the hooks of the loop's own steps, and give the optimizer its methods back."""
        while self._handles:
            self._handles.pop().remove()
        self._methods.put_back()

    def _refuse(self) -> NoReturn:
        raise RecipeError(OWN_STEPS.backward)


@final
class ReplacedMethods:
    """Methods of the user's objects that a session answers, and what they were."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, **functions: Callable[..., Any]) -> None:
        """Replace methods of an object, by these names, by functions of the object and its arguments."""
        for name, function in functions.items():
            method = MethodType(function, owner)
            self._held.append((owner, name, vars(owner).get(name), method))
            vars(owner)[name] = method

    def put_back(self) -> None:
        """Give the objects their own methods back, but where somebody else has wrapped the replaced ones since."""
        for owner, name, before, own in self._held:
            if vars(owner).get(name) is not own:
                continue
            if before is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before
        self._held.clear()


def refuse_closure(closure: Callable[[], Any] | None) -> None:
    """Raises `RecipeError` where an optimizer's step was given one."""
    if closure is not None:
        raise RecipeError(
            "optimizer.step(closure) would compute the loss inside of the step. Write the forward,"
            " session.backward(loss) and optimizer.step() one after another."
        )
