"""A training loop of one's own, under any plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.blueprint import look_for_blocks
from weft.comm import Mesh, group_store
from weft.engine.proof import Prove
from weft.entry._agreement import check_same_facts
from weft.entry._arguments import check_prepared
from weft.entry._calls import Calls
from weft.entry._dtypes import casts_inputs, check_dtypes
from weft.entry._first_looks import look_first
from weft.entry._guards import Guard, refuse_wrapped
from weft.entry._loss_parameters import LossParameters
from weft.entry._nets import Nets
from weft.entry._planning import Planning, UserLoss
from weft.entry._prepared_facts import facts_of_prepared, first_batch_of
from weft.entry._proof import SessionProof, variables_kept
from weft.entry._recording import SessionRuns
from weft.entry._rounds import RoundsOfSession
from weft.entry._same_data import facts_of_data
from weft.entry._share_errors import explain_share
from weft.entry._state import TrainState
from weft.entry._user_batches import BatchStream, UserBatch, shape_of, without_labels
from weft.entry._user_optimizer import group_indices
from weft.errors import RecipeError
from weft.launch import Distributed, RankFailure, at_end
from weft.models import Blueprint, CutTable, SplitRule
from weft.models.hooks import refuse_given
from weft.plan import MeshPlan, Plan
from weft.recipe import Recipe


class Session:
    """This process's place in a job.  Made by `weft.session`."""

    def __init__(
        self, distributed: Distributed, planning: Planning, runs: SessionRuns, prove: Prove, leaving: ExitStack
    ) -> None:
        """`leaving`: what is to be undone of the joining."""
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self.device = distributed.device
        self._distributed, self._planning, self._runs = distributed, planning, runs
        self._prove: Prove = prove
        self._prepared = 0
        self.nets = Nets()
        """What is looked for; tests switch nets off, before `prepare`."""
        self._meshes: dict[MeshPlan, Mesh] = {}
        self._calls = Calls(_store_of_session(self.rank, self.world_size), self.rank, self.world_size, self.device)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owned: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._rounds = RoundsOfSession(self._calls)
        self._states: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()
        leaving.callback(register_optimizer_step_pre_hook(self._refuse_foreign_optimizer).remove)
        self._leaving: ExitStack | None = leaving.pop_all()
        self._stay_open = at_end(self._leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def close(self) -> None:
        """Wait for the other ranks to come here, end what prepared models run in the background, and their last rounds
        of local steps, and leave the job; nothing more can be done in it.

        The end of a `with` block does it, and so does that of a script.  Closing again does nothing.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close; or leave with what the ranks know of one another, where an error has ended the session here."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        self._stay_open()
        if error is None:
            try:
                self._close_models()  # not after an error, when others may be gone whose messages it would wait for
                with self._calls.call("the end of the session", meets=True):
                    pass
            except BaseException as problem:
                self._fail(problem, leaving)
                raise
            self._calls.close()
            leaving.close()
        else:
            self._fail(error, leaving)

    def _close_models(self) -> None:
        self._rounds.close()
        for state in self._states.values():
            state.close()

    def _fail(self, error: BaseException, leaving: ExitStack) -> None:
        """Say to the others what ends the session on this rank, and leave.  Raises what is known beside it."""
        for state in self._states.values():
            state.let_go()
        self._runs.fail(error)
        models = [(state.model, state.plan) for state in self._states.values()]
        explained = self._calls.explained(error) or explain_share(error, models)
        self._calls.close(error)
        self._runs.tell_failure()
        leaves = error if explained is None else explained
        if explained is not None:
            explained.__cause__ = error
        leaving.__exit__(type(leaves), leaves, leaves.__traceback__)
        if explained is not None:
            raise explained from error

    @property
    def rank_failure(self) -> RankFailure | None:
        """The first other rank that failed, and how; None while all live, or where no supervisor would say so (under
        torchrun).  Nothing collective can be done any more then, `save` included."""
        return self._distributed.rank_failure

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on rank 0 alone, and at once.  Not collective."""
        if self.rank == 0:
            print(*values, sep=sep, end=end, flush=True)

    @contextmanager
    def first(self, *, per_host: bool = False) -> Generator[None]:
        """A section that rank 0 goes through before the others: what it downloads or prepares, they find.

        Call on every rank.  With `per_host` the first rank of every host goes first, for folders that hosts do not
        share.  The others wait no longer than for any collective (`collective_timeout_seconds`).

        Raises:
            CollectiveError: on the others, if a rank that goes first leaves the section by an error.
        """
        info = self._planning.rank_info
        goes_first = self.rank == 0 or (per_host and info is not None and info.local_rank == 0)
        if goes_first:
            yield
        with self._calls.call("session.first()", meets=True):
            pass
        if not goes_first:
            yield

    def _refuse_foreign_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Of every optimizer that is about to step: refuse one that holds parameters of a prepared model."""
        if optimizer in self._optimizers:
            return  # refuses by itself, outside a step
        prepared = {id(parameter) for state in self._states.values() for parameter in state.model.parameters()}
        prepared.update(self._owned.keys())
        if any(id(parameter) in prepared for group in optimizer.param_groups for parameter in group["params"]):
            raise RecipeError(
                f"this {type(optimizer).__name__} holds parameters of a model that session.prepare was given with"
                " another optimizer: its update would be lost with the next step. Give prepare one optimizer with a"
                " parameter group for each setting."
            )

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[UserBatch],
        *,
        loss: UserLoss,
        inputs: Mapping[str, str] | None = None,
        split: Sequence[SplitRule] | Mapping[str, Any] = (),
        cut: CutTable | None = None,
        vocabulary_head: str | None = None,
        max_grad_norm: float | None = None,
        batch_size: int | None = None,
    ) -> TrainState:
        """Bring a model and its optimizer under the session's plan.  Call on every rank with equal arguments.

        The model stays the same object of the same class with the same parameter names; its weights, which must be
        equal on all ranks (rank 0's are taken), become this rank's share.  The optimizer stays yours and so do its
        schedulers.

        Args:
            model: constructed on the CPU or the session's device.
            optimizer: over the model's parameters, before its first step.
            loader: its batch size is the global batch, whatever the number of ranks; the batches of a batch sampler may
                differ in size and length.
            loss: `loss(outputs, batch)`; the batch is a microbatch in the shape that the loader gives.
            inputs: argument of the model's forward → field of the batch (by position for tuples: "0"); found by name.
            split: how modules split over the tensor axis; found for Hugging Face models.
            cut: where the model may be cut into stages; likewise.
            vocabulary_head: name of a head that only a vocabulary loss reads, which then may never hold full logits.
            max_grad_norm: clip the global gradient norm.
            batch_size: the global batch, where the loader does not say it; the largest, where batches differ.

        Raises:
            WeftError: of the class of what does not fit: model, optimizer, batches or plan.
        """
        with self._calls.call("session.prepare()", meets=True), variables_kept(model, loss, optimizer) as put_back:
            check_prepared(model, optimizer, loss, split, cut, vocabulary_head)
            refuse_wrapped(model)
            stream = BatchStream(loader, self._planning.seed, lambda fields: None, batch_size)
            stream.warn_of_workers()
            self._refuse_taken(model)
            refuse_given(model, vocabulary_head, "before prepare")
            data = facts_of_data(stream, self._planning.seed) if self.nets.data and self.world_size > 1 else {}
            check_same_facts({**facts_of_prepared(model, optimizer, stream, max_grad_norm), **data}, self.device)
            recipe = self._planning.recipe(model, stream.batch_size, max_grad_norm)
            example = first_batch_of(loader)
            blueprint = self._planning.blueprint(model, inputs, split, cut, vocabulary_head, example)
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
        model = blueprint.module
        if self._planning.plan is not None:  # what is chosen here shares out data alone
            look_for_blocks(blueprint, self._planning.plan)
        looks = look_first(blueprint, loss, example, self._planning.plan, self.nets, self.device)
        given_loss, loss = loss, looks.declared(loss)
        plan = self._planning.choose(recipe, blueprint, loss, example, looks)
        groups = group_indices(optimizer, model)
        check_dtypes(model, optimizer, plan)
        mesh = self._mesh(plan)
        given = (self._prove, self._planning.quiet, recipe, plan, blueprint, mesh, put_back)
        proof = SessionProof.of(*given, optimizer=optimizer, loss=given_loss, stream=stream, example=example)
        self._own(model)
        self._prepared += 1
        nominal = float(recipe.batch.global_batch_size * (blueprint.sequence_length or 1))
        held = LossParameters(loss, self._owned, plan, mesh, nominal_count=nominal)
        state = TrainState(
            recipe=recipe,
            plan=plan,
            blueprint=replace(blueprint, casts_inputs=casts_inputs(model, plan)),
            mesh=mesh,
            optimizer=optimizer,
            groups=groups,
            stream=loader,
            loss=loss,
            like=shape_of(example),
            hint=without_labels(model, shape_of(example), blueprint.inputs),
            recorded=self._runs.open(self._prepared, plan),
            calls=self._calls,
            rounds=self._rounds,
            guard=Guard(model, held, watches_edits=self.nets.edits),
            number=self._prepared,
            proof=proof,
        )
        self._optimizers.add(optimizer)
        self._own(state.model)
        self._states[self._prepared] = state
        return state

    def _refuse_taken(self, model: nn.Module) -> None:
        """A parameter has one owner: prepared twice, the first would go on training storage that the model has left."""
        taken = [name for name, parameter in model.named_parameters() if id(parameter) in self._owned]
        if taken:
            raise RecipeError(
                f"{len(taken)} parameters of the {type(model).__name__} ({', '.join(taken[:3])}) are in a model that"
                " this session has prepared already. Prepare a model once, or construct it anew."
            )

    def _own(self, model: nn.Module) -> None:
        self._owned.update({id(parameter): parameter for parameter in model.parameters()})

    def _mesh(self, plan: Plan) -> Mesh:
        if plan.mesh not in self._meshes:
            self._meshes[plan.mesh] = Mesh(plan.mesh, self.device, timeout_seconds=self._planning.timeout_seconds)
        return self._meshes[plan.mesh]


def _store_of_session(rank: int, num_ranks: int) -> dist.Store | None:
    """A store for one session's ranks alone: each counts there how many it has had."""
    if num_ranks == 1 or not dist.is_initialized():
        return None
    store = group_store()
    return dist.PrefixStore(f"weft/session/{store.add(f'weft/sessions/{rank}', 1)}", store)
