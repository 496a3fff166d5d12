"""A loop that keeps its own steps: its models, optimizers and loaders, which a session was given without a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from weft.api.batches.batch_shape import CountedBatch, taken_apart
from weft.api.batches.loop_draws import PlacedDraws
from weft.api.batches.losses import LossOfUser, stand_in_loss, warn_of_sum
from weft.api.batches.outputs import GatheredOutputs
from weft.api.batches.sharded_loader import LoaderSharing, LoopLoader, SharedRows
from weft.api.guards.model_guard import OWN_STEPS, refuse_wrapped
from weft.api.loop.first_call import FirstCall, as_prepared, called_with
from weft.api.loop.open_step import OpenModel
from weft.api.loop.saves import LoopObjects, LoopSaves
from weft.api.loop.shared_optimizer import SharedOptimizer
from weft.api.planning.session_plan import Planning
from weft.api.preflight.proof import variables_kept
from weft.api.prepared.manual_step import check_loss, check_manual
from weft.api.prepared.models import Models, facts_of_model
from weft.api.ranks.agreement import check_same_facts, take_weights_of_rank_0
from weft.api.saving.optimizer_states import CarriedState
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError, PlanError, RecipeError
from weft.model.hooks import refuse_given

_INSTEAD = "session.prepare(model, optimizer, loader, loss=…) and state.step(batch)"


@final
class OwnLoop:
    """The things of a loop of one's own.  Every method is called on every rank."""

    def __init__(self, models: Models, world: Any) -> None:
        self._models, self._planning = models, models.planning
        plan = self._planning.plan
        mesh = None if plan is None else models.mesh(plan)
        self._sharing = LoaderSharing(
            ranks=self._planning.world_size if plan is None else plan.mesh.data,
            index=self._planning.rank if mesh is None else mesh.data_index,
            device=self._planning.device,
            world=world,
            calls=models.calls,
            seed=self._planning.seed,
        )
        if self._sharing.ranks > 1:
            self._sharing.draws = PlacedDraws(self._planning.device)
        self._shared = SharedRows(self._sharing)
        self._things = LoopObjects()
        self.saves = LoopSaves(self._things, self._planning.device, self._any_mesh)
        self._waiting: dict[int, tuple[nn.Module, FirstCall]] = {}
        """Models that have not been called yet, or have no optimizer."""
        self._open = self._things.begun
        self._hooks: list[RemovableHandle] = []
        self._has_looked = False
        """Whether a loss was looked at: the first tells what kind the loop has."""

    @property
    def sharing(self) -> LoaderSharing:
        """How data are shared out, and what was handed out last."""
        return self._sharing

    # ── prepare ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, things: Sequence[Any], split: Any) -> list[Any]:
        """Take things over, and return what the loop goes on with, in the same order."""
        kinds = {
            f"thing {place} that session.prepare was given": _kind_of(thing) for place, thing in enumerate(things, 1)
        }
        check_same_facts(kinds, self._planning.device)
        return [self._taken(thing, split) for thing in things]

    def _taken(self, thing: Any, split: Any) -> Any:
        match thing:
            case nn.Module():
                self._take_model(thing, split)
            case torch.optim.Optimizer():
                self._models.optimizers.add(thing)
                self._things.optimizers.append(thing)
                self._hooks.append(thing.register_step_pre_hook(self._refuse_unbegun))
            case torch.optim.lr_scheduler.LRScheduler():
                self._things.schedulers.append(thing)  # it acts on the optimizer, which stays the loop's own
            case _:
                loaders = self._things.loaders
                loaders.append(LoopLoader(thing, self._sharing, len(loaders) + 1))
                return loaders[-1]
        return thing

    def _take_model(self, model: nn.Module, split: Any) -> None:
        refuse_wrapped(model)
        self._models.refuse_taken(model)
        refuse_given(model, None, "before prepare")
        if (plan := self._planning.plan) is not None:
            check_manual(replace(plan, microbatch=MicrobatchPlan()), None, _INSTEAD)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RecipeError(
                f"{type(model).__name__} has parameters without storage (device meta). Construct it on the CPU."
            )
        check_same_facts(facts_of_model(model), self._planning.device)
        model.to(self._planning.device)
        take_weights_of_rank_0(model, self._planning.device, self._sharing.world)
        self._models.own(model)
        first = FirstCall(model, lambda args, kwargs: self._begin(model, args, kwargs, split))
        self._waiting[id(model)] = (model, first)
        self._things.models.append(model)

    # ── the first forward ─────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, model: nn.Module, args: Any, kwargs: Any, split: Any) -> bool:
        """Choose the model's plan and lay it over it, if its optimizer is known; else it stays plain, as a teacher."""
        optimizer = self._optimizer_of(model)
        if optimizer is None:
            return False
        shared = self._keeper_of(optimizer, model)
        optimizer = optimizer if shared is None else shared.part_of(model)
        _, first = self._waiting.pop(id(model))
        first.restore()
        carried = CarriedState(optimizer)
        try:
            called = self._models.calls.call(f"the first forward of {type(model).__name__}", meets=True)
            saves = self.saves.beginning(model)
            with (
                called,
                self._sharing.aside(),
                as_prepared(model),
                saves as begun,
                variables_kept(model, stand_in_loss, optimizer),
            ):
                before = nn.ParameterList(model.parameters())
                begun.append(self._brought(model, optimizer, args, kwargs, split))
                if shared is not None:
                    shared.add(begun[0], before)
                carried.give(begun[0].load_optimizer_state)
                self._open.append((model, begun[0]))
        except BaseException:
            carried.put_back()
            self._waiting[id(model)] = (model, FirstCall(model, first.begin))
            raise
        return True

    def _brought(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, split: Any
    ) -> OpenModel:
        check_same_facts(facts_of_model(model, optimizer), self._planning.device)
        batch = self._sharing.last
        seen = called_with(model, args, kwargs, None if batch is None else max(batch.stop - batch.start, 1))
        with seen.by_name(model):
            return self._laid_over(model, optimizer, seen.example, split)

    def _laid_over(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, example: CountedBatch, split: Any
    ) -> OpenModel:
        shape, batch = taken_apart(example)[1], self._sharing.last
        planning, samples = self._planned(example.samples * self._sharing.ranks if batch is None else batch.size)
        recipe = planning.recipe(model, samples, None)
        inputs = {name: name for name in example}
        blueprint = planning.blueprint(model, inputs, split, None, None, example, checks_inputs=False)
        planned = self._models.plan(planning, recipe, blueprint, optimizer, stand_in_loss, example)
        check_manual(planned.plan, None, _INSTEAD)
        state = self._models.bring(
            planned,
            LossOfUser(stand_in_loss, shape),
            lambda parts: OpenModel(parts, self._sharing),
            nominal_count=1.0,
            messages=OWN_STEPS,
            name="state",
        )
        self._say("proof     not proven: the loop computes its losses itself")
        assert isinstance(state, OpenModel)
        return state

    def _planned(self, samples: int) -> tuple[Planning, int]:
        """How plans are chosen for steps of a loop that accumulates by itself, and the samples of one: each data rank
        takes its whole share at once."""
        planning, ranks = self._planning, self._sharing.ranks
        number = planning.given.microbatches
        if number not in (None, 1):
            raise PlanError(
                f"weft.session(microbatches={number}) says how often a step accumulates, and this loop does so itself."
                " Leave it out, and call optimizer.step() after every so many backwards."
            )
        share = -(-samples // ranks)
        planning = replace(planning, batch_size=samples)
        if planning.plan is None:
            return replace(planning, given=replace(planning.given, microbatches=1)), share * ranks
        if planning.plan.microbatch.per_step != 1:
            self._say("batch     one microbatch per step: the plan names more, and this loop accumulates by itself")
        own = MicrobatchPlan(size=share, per_step=1)
        return replace(planning, plan=replace(planning.plan, microbatch=own)), share * ranks

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        optimizers = self._things.optimizers_of(model)
        if len(optimizers) > 1:
            raise RecipeError(
                f"{len(optimizers)} of the optimizers that session.prepare was given hold parameters of one"
                f" {type(model).__name__}. {_instead_of_several(model, optimizers)}"
            )
        return optimizers[0] if optimizers else None

    def _refuse_unbegun(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer's own step where no forward has begun the model: its gradients would be this rank's
        alone."""
        if self._planning.world_size == 1 or any(state.optimizer is optimizer for _, state in self._open):
            return
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model, _first in self._waiting.values():
            if any(parameter.grad is not None and id(parameter) in ids for parameter in model.parameters()):
                kind = type(model).__name__
                raise RecipeError(
                    f"optimizer.step() would update the {kind} by this rank's gradients alone: it has had no forward,"
                    f" which brings it under its plan, and was used by a method of its own. Call the {kind} itself, as"
                    " model(…), in every step."
                )

    def _keeper_of(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> SharedOptimizer | None:
        """Return the shared optimizer that holds an optimizer of several models; None: it has parameters of this one
        alone."""
        known = next((shared for shared in self._things.shared if shared.optimizer is optimizer), None)
        own = {id(parameter) for parameter in model.parameters()}
        others = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} - own
        if known is not None or not others:
            return known
        prepared = {id(parameter) for one in self._things.models if one is not model for parameter in one.parameters()}
        if not others <= prepared:
            return None  # what is no model's is refused where the groups are looked at
        self._things.shared.append(SharedOptimizer(optimizer))
        return self._things.shared[-1]

    def _say(self, line: str) -> None:
        if self._planning.rank == 0 and not self._planning.quiet:
            print(line, flush=True)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def backward(self, loss: Any, *, reduction: str, retain_graph: bool, is_last: bool | None) -> None:
        """See `Session.backward`."""
        if reduction not in ("mean", "sum"):
            raise DataError(f"session.backward(reduction={reduction!r}) is not had. Give 'mean' or 'sum'.")
        check_loss(loss, call="session.backward()", of="the rank's", fixed="under torch.no_grad()")
        models = [model for _, model in self._open if model.is_reachable]
        if not models:
            raise RecipeError(
                "session.backward() was called before a prepared model with a prepared optimizer has had its first"
                " forward. Give both to session.prepare, and go on with what it returns."
            )
        self._sharing.check_shares()
        if self._sharing.draws is not None:
            self._sharing.draws.check()
        if reduction == "mean" and not self._has_looked and self._sharing.ranks > 1:
            warn_of_sum(loss, self._sharing.ranks)
        self._has_looked = True
        share = self._share(models) if reduction == "mean" else self._has_samples
        addend = loss.reshape(()) if share == 1.0 else loss.reshape(()) * share
        scales = {model.scale for model in models}
        if len(scales) > 1:
            raise PlanError(
                "the models of this loop are in fp16 and have come to other loss scales, and one loss cannot be"
                " multiplied by both. Use fp32 or bf16."
            )
        scale, last = scales.pop(), _last_of(models, is_last)
        objective = addend if scale == 1.0 else addend * scale
        # The one whose reductions begin in the backward is left first: all ranks then begin all of them in one order.
        ordered = [model for model in models if model is not last] + ([last] if last is not None else [])
        with self._sharing.aside(), _within(ordered, last, addend, retain_graph):
            objective.backward(retain_graph=retain_graph)

    def _share(self, models: Sequence[OpenModel]) -> float:
        """Return the weight of the mean over this rank's samples, 0 to 1."""
        batch = self._sharing.last
        if any(model.plan.data_parallel.replicas_step_alone for model in models):
            return 1.0 if batch is None else self._share_of_replica(models[0])
        return 1.0 / self._sharing.ranks if batch is None else batch.share

    @property
    def _has_samples(self) -> float:
        """1; or 0, where the rank was handed a filler."""
        batch = self._sharing.last
        return float(batch is None or batch.start < batch.stop)

    def _share_of_replica(self, model: OpenModel) -> float:
        """Return the weight of this rank's samples in the mean of a replica that steps by itself, 0 to 1."""
        batch, width = self._sharing.last, model.plan.mesh.shard
        assert batch is not None, "asked of batches that were handed out"
        first = self._sharing.index // width * width
        shares = [self._sharing.at(rank).share_of(batch.size, 0) for rank in range(first, first + width)]
        return (batch.stop - batch.start) / max(sum(share.stop - share.start for share in shares), 1)

    def clip_norm(self, what: Any, limit: float) -> Tensor:
        """See `Session.clip_grad_norm_`."""
        what = what if isinstance(what, nn.Module | Tensor) else list(what)
        models = self._whose(what, "session.clip_grad_norm_()")
        if not models:
            return nn.utils.clip_grad_norm_(what.parameters() if isinstance(what, nn.Module) else what, limit)
        norms = [model.gradient_norm() for model in models]
        norm = norms[0] if len(norms) == 1 else math.hypot(*norms)
        for model in models:
            model.scale_gradients(min(1.0, float(limit) / (norm + 1e-6)))
        return torch.tensor(norm, device=self._planning.device)

    def clip_value(self, what: Any, limit: float) -> None:
        """See `Session.clip_grad_value_`."""
        what = what if isinstance(what, nn.Module | Tensor) else list(what)
        models = self._whose(what, "session.clip_grad_value_()")
        if not models:
            nn.utils.clip_grad_value_(what.parameters() if isinstance(what, nn.Module) else what, limit)
        for model in models:
            model.clip_value(float(limit))

    def mean(self, value: Tensor | float) -> float:
        """See `Session.mean`."""
        batch, ranks = self._sharing.last, self._sharing.ranks
        own = torch.as_tensor(value, dtype=torch.float64, device=self._planning.device).detach()
        if own.numel() != 1:
            raise DataError(f"session.mean() wants a number, and got a tensor of {tuple(own.shape)}.")
        share = 1.0 / ranks if batch is None else batch.share
        own = own.reshape(()) * share if share else torch.zeros_like(own.reshape(()))  # of a filler it may be anything
        with self._models.calls.call("session.mean()"):
            if self._sharing.world is not None:
                dist.all_reduce(own, group=self._sharing.world)
        return float(own) * ranks / self._planning.world_size  # the other ranks have the same samples as these

    def share(self, values: Sequence[Any], dim: int) -> list[Any]:
        """See `Session.share`."""
        return self._shared.rows(values, dim)

    def gather(self, value: Any) -> Any:
        """See `Session.gather`."""
        batch = self._sharing.last
        collected = GatheredOutputs(lambda outputs, batch: outputs, self._any_mesh())
        with self._models.calls.call("session.gather()", meets=True):
            none = batch is not None and batch.start == batch.stop
            collected.take(tree_map_only(Tensor, lambda each: each[:0], value) if none else value)
            return collected.join()

    def weights(self, model: nn.Module, all_gather: Callable[[Any], list[Any]]) -> dict[str, Tensor]:
        """See `SessionInternals.weights`."""
        state = self._things.state_of(model)
        return dict(model.state_dict()) if state is None else state.gathered_weights(all_gather)

    def forget(self, things: Sequence[Any]) -> None:
        """See `SessionInternals.forget`."""
        for thing in things:
            if waiting := self._waiting.pop(id(thing), None):
                waiting[1].restore()
            if (state := self._things.state_of(thing)) is not None:
                state.close()
            self._things.drop(thing)
        self._models.disown([thing for thing in things if isinstance(thing, nn.Module)])

    def settle(self, seed: int | None, local_steps: int | None) -> None:
        """See `SessionInternals.settle`."""
        planning = self._planning
        known = planning.given.local_steps if planning.plan is None else planning.plan.data_parallel.round_length
        if local_steps not in (None, known) and (self._open or planning.plan is not None):
            raise RecipeError(
                f"local_steps = {local_steps} came after a plan with {known} was given, or chosen at a"
                " model's first forward. Call it before, or write it in the plan as data_parallel.local_steps."
            )
        if seed is not None:
            planning = replace(planning, seed=seed)
            self._sharing.seed = seed
        if local_steps is not None:
            parts = replace(planning.given, local_steps=local_steps)
            permit = replace(planning.permit, local_steps=parts.most_local_steps)
            planning = replace(planning, given=parts, permit=permit)
        self._planning = self._models.planning = planning

    def state(self, model: nn.Module) -> OpenModel:
        """See `Session.state`."""
        state = self._things.state_of(model)
        if state is None:
            raise RecipeError(
                f"this {type(model).__name__} has no state yet: a model that was prepared without a loss= is brought"
                " under its plan by its first forward, with its prepared optimizer. Call it once before."
            )
        return state

    def _any_mesh(self) -> Mesh:
        """Return a mesh that has all ranks, whatever the models' own are."""
        return self._models.mesh(self._planning.plan or Plan(mesh=MeshPlan(replicate=self._planning.world_size)))

    def _whose(self, what: Any, call: str) -> list[OpenModel]:
        """The models whose gradients are meant; none: one that is plain still."""
        if isinstance(what, nn.Module):
            return [] if id(what) in self._waiting else [self.state(what)]
        parts = {id(item) for item in (_listed(what))}
        models: list[OpenModel] = []
        for _, model in self._open:
            trained = {id(parameter) for parameter in model.model.parameters() if parameter.requires_grad}
            if not parts & trained:
                continue
            if trained - parts:
                raise RecipeError(
                    f"{call} was given {len(parts & trained)} of the {len(trained)} parameters of a model, whose"
                    " gradients are clipped as one. Give it the model, or model.parameters()."
                )
            models.append(model)
        if not models:
            raise RecipeError(
                f"{call} was given no parameters of a prepared model. Give it the model itself, or what its"
                " parameters() returns now: at the first forward the plan may have put others in their place."
            )
        return models

    def close(self) -> None:
        """Release models that have not begun; the others end with the session."""
        for _, first in self._waiting.values():
            first.restore()
        self._waiting.clear()
        self.restore()

    def restore(self) -> None:
        """Give torch its functions back, and shared optimizers theirs."""
        for shared in self._things.shared:
            shared.restore()
        while self._hooks:
            self._hooks.pop().remove()
        if self._sharing.draws is not None:
            self._sharing.draws.close()


def _instead_of_several(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return the line to write in place of several optimizers over one model."""
    parts: list[list[str]] = []
    for optimizer in optimizers:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parts.append(
            [name for name, part in model.named_children() if any(id(own) in ids for own in part.parameters())]
        )
    names = [name for part in parts for name in part]
    one = "Make one optimizer of them, with a parameter group for each setting"
    if len(set(names)) < len(names) or not all(len(part) == 1 for part in parts):
        return f"{one}."
    listed = ", ".join(f"model.{name}" for name in names)
    return (
        f"{one}, where they step together; where each steps by itself, prepare the parts in place of the whole, which"
        f" goes on calling them: session.prepare({listed}, …)."
    )


def _last_of(models: Sequence[OpenModel], is_last: bool | None) -> OpenModel | None:
    """The model whose reductions begin in a backward that is its last, or likely so: the largest."""
    expected = [model for model in models if model.size and (model.expects_last if is_last is None else is_last)]
    return max(expected, key=lambda each: each.size, default=None)


@contextmanager
def _within(models: Sequence[OpenModel], last: OpenModel | None, addend: Tensor, retain_graph: bool) -> Generator[None]:
    """A backward that may reach all of these.  No ExitStack: an error that passes one stays alive."""
    if not models:
        yield
        return
    first = models[0]
    backward = first.backward(addend, retain_graph=retain_graph, is_last=first is last)
    with backward, _within(models[1:], last, addend, retain_graph):
        yield


def _listed(what: Any) -> list[Tensor]:
    return [what] if isinstance(what, Tensor) else list(cast(Iterable[Tensor], what))


def _kind_of(thing: Any) -> str:
    if not isinstance(thing, nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler) and (
        isinstance(thing, str | bytes | Tensor) or not isinstance(thing, Iterable)
    ):
        raise RecipeError(
            f"session.prepare was given a {type(thing).__name__}, and prepares models, optimizers, loaders and LR"
            " schedulers. Leave it out."
        )
    return type(cast(object, thing)).__name__
