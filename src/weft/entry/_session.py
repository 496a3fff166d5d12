"""A training loop of one's own, under any plan."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.blueprint import look_for_blocks
from weft.comm import Mesh, group_store
from weft.engine.proof import Prove
from weft.entry._agreement import check_same_facts, check_same_on_all_ranks
from weft.entry._arguments import check_inputs, check_prepared, check_session, run_folder_of
from weft.entry._auto import describe_user_model, look_at_user_model, machine_for
from weft.entry._batch_shape import taken_apart
from weft.entry._calls import Calls
from weft.entry._dtypes import casts_inputs, check_dtypes
from weft.entry._first_looks import FirstLooks, look_first
from weft.entry._guards import Guard, refuse_wrapped
from weft.entry._loss_parameters import LossParameters
from weft.entry._nets import Nets
from weft.entry._prepared_facts import facts_of_prepared, first_batch_of
from weft.entry._proof import SessionProof, check_prove, variables_kept
from weft.entry._recording import SessionRuns
from weft.entry._rounds import RoundsOfSession
from weft.entry._same_data import facts_of_data
from weft.entry._settings import PlanSettings
from weft.entry._share_errors import explain_share
from weft.entry._state import TrainState
from weft.entry._user_batches import BatchStream, UserBatch, infer_inputs, shape_of, without_labels
from weft.entry._user_loss import LossOfUser
from weft.entry._user_optimizer import group_indices
from weft.errors import RecipeError
from weft.events import OnEvent, Track
from weft.launch import Distributed, RankFailure, RankInfo, initialise_distributed, threads_of_user
from weft.models import Blueprint, CutTable, SplitRule, tables_of
from weft.models.hooks import refuse_given
from weft.plan import MeshPlan, Plan, check_plan, check_runnable, complete_plan, describe_plan, load_plan
from weft.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Precision, Recipe, RunRecipe
from weft.search import choose_plan
from weft.techniques.registry import check_no_loop
from weft.worker import facts_of_blueprint

logger = logging.getLogger(__name__)

UserLoss = Callable[[Any, Any], Any]
"""`loss(outputs, batch)`: a (sum, count) pair, or a scalar that is a mean over the batch's samples."""


@contextmanager
def session(
    plan: Plan | str | Path = "auto",
    *,
    seed: int = 1234,
    permit: Sequence[Precision] = ("fp32",),
    compression: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    accumulate: int | None = None,
    local_steps: int = 0,
    folder: str | Path | None = None,
    record: bool = True,
    track: Track | None = None,
    on_event: OnEvent | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    collective_timeout_seconds: float | None = None,
    prove: Prove = "auto",
    quiet: bool = False,
) -> Generator[Session]:
    """Join this process to its job (torchrun, `weft launch`, or alone in plain Python) and leave it at the end.

    Args:
        plan: how to split; `auto` is the fastest predicted split of the data over the job's ranks: ZeRO stage,
            microbatch, recomputation and precision.  It never splits the model, because a loop of one's own may use
            the model, or several, as it likes: name a plan for that.
        seed: of data order and of dropout.
        permit: precisions that a plan may choose from.
        compression: lossy compressions of gradients that a plan may name.
        settings: of the plan by dotted key, such as `{"data_parallel.zero": 3, "compute.compile": True}`: laid over the
            plan, or what `auto` must leave as it is.
        accumulate: beside `auto`, microbatches of a rank in a step; the global batch stays the loader's.
        local_steps: steps that each data rank may take by itself before all average their weights, which is other
            mathematics than that of one process (0: none).  Beside `auto` they take so many, and the average is plain
            (local SGD), unless `settings` say otherwise (DiLoCo's `data_parallel.outer_momentum`); one process has
            nobody to average with.  A plan of your own says how many it takes, at most these.
        folder: of the run, as that of `weft train`: plan, metrics, logs, and what `save` writes.  By default
            `runs/<script>-<date>-<n>`; to go on with an earlier run, give its folder and call `load`.
        record: keep plan, metrics and logs; False leaves nothing in the folder (then by default `runs/session`) but
            what `save` writes.
        track: `track(name, value, step)` is called on rank 0 with every number that the run reports (`train/loss`,
            `evaluation/accuracy`, `rate/samples_per_second`, …), such as `SummaryWriter(…).add_scalar`; of further
            models with names that begin with `model-2/`.  One that raises is asked no more, with a warning.
        on_event: `on_event(event, model)` is called on every rank with everything that happens to the session's models
            (counted from 1): `StepEvent`, `EpochEvent`, `EvaluationEvent`, `CheckpointEvent`, … of `weft.events`, each
            with its `kind`.  It is called when the call that it is about is through (`state.step`, …), may call the
            state itself where all ranks do, and what it raises comes out of that call.
        device: of this job's ranks.
        collective_timeout_seconds: how long ranks wait for one another; by default the plan's own
            (`compute.collective_timeout_seconds`), 600 s under `auto`.
        prove: compare two steps of every prepared model under its plan with plain PyTorch on one process, before the
            first real one: `auto` where it takes no longer than 10 s, and once for the same code, plan and versions;
            `always`; or `never`.
        quiet: do not print the plan and the proof.

    Raises:
        WeftError: the plan cannot be read, or the ranks cannot be joined.

    Example::

        with weft.session(plan="auto") as session:
            state = session.prepare(model, optimizer, loader, loss=loss_fn)
            for batch in state.batches():
                step = state.step(batch)
    """
    with ExitStack() as stack:
        check_session(permit, compression, settings, device, track, record=record, quiet=quiet)
        own_folder = run_folder_of(folder)
        given = PlanSettings(settings=settings or {}, accumulate=accumulate, local_steps=local_steps)
        if type(seed) is not int or seed < 0:
            raise RecipeError(f"seed = {seed!r} is no seed. Give a whole number from 0 on.")
        requested = load_plan(plan) if plan != "auto" and not isinstance(plan, Plan) else plan
        requested = given.over(requested) if isinstance(requested, Plan) else requested
        if isinstance(requested, Plan) and requested.compute.device != "auto":
            device = requested.compute.device
        own_plan = _with_timeout(requested if isinstance(requested, Plan) else Plan(), collective_timeout_seconds)
        timeout_seconds, backend = own_plan.compute.timeout_seconds, own_plan.compute.backend
        joining = initialise_distributed(device, backend=backend, timeout_seconds=timeout_seconds)
        distributed = stack.enter_context(joining)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        session = Session(
            distributed,
            RankInfo.from_environment(),
            own_plan if isinstance(requested, Plan) else None,
            given,
            timeout_seconds=timeout_seconds,
            seed=seed,
            permit=PermitRecipe(
                precision=tuple(permit), compression=tuple(compression), local_steps=given.most_local_steps
            ),
            runs=SessionRuns(
                own_folder,
                distributed.rank_info,
                record=record,
                track=track,
                on_event=on_event,
            ),
            prove=check_prove(prove),
            quiet=quiet,
        )
        stack.callback(session.close_runs)
        stack.callback(register_optimizer_step_pre_hook(session.refuse_foreign_optimizer).remove)
        with session.watched():
            yield session
            session.close()  # not after an error, when others may be gone whose messages it would wait for
            session.wait_for_all()


class Session:
    """This process's place in a job.  Made by `weft.session`."""

    def __init__(
        self,
        distributed: Distributed,
        rank_info: RankInfo | None,
        plan: Plan | None,
        given: PlanSettings,
        *,
        timeout_seconds: float,
        seed: int,
        permit: PermitRecipe,
        runs: SessionRuns,
        prove: Prove,
        quiet: bool,
    ) -> None:
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self.device = distributed.device
        self._distributed = distributed
        self._rank_info = rank_info
        self._plan, self._given = plan, given
        self._timeout_seconds, self._seed = timeout_seconds, seed
        self._permit, self._runs = permit, runs
        self._prove: Prove = prove
        self._quiet, self._prepared = quiet, 0
        self.nets = Nets()
        """What is looked for; tests switch nets off, before `prepare`."""
        self._meshes: dict[MeshPlan, Mesh] = {}
        self._calls = Calls(_store_of_session(self.rank, self.world_size), self.rank, self.world_size, self.device)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._owned: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self._rounds = RoundsOfSession(self._calls)
        self._states: weakref.WeakValueDictionary[int, TrainState] = weakref.WeakValueDictionary()

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
        goes_first = self.rank == 0 or (per_host and self._rank_info is not None and self._rank_info.local_rank == 0)
        if goes_first:
            yield
        with self._calls.call("session.first()", meets=True):
            pass
        if not goes_first:
            yield

    def close(self) -> None:
        """End what prepared models run in the background, and their last rounds of local steps; they take no more
        steps.  Leaving the session does it."""
        self._rounds.close()
        for state in self._states.values():
            state.close()

    def close_runs(self) -> None:
        """Close the files of the record."""
        self._runs.close()

    @contextmanager
    def watched(self) -> Generator[None]:
        """Leave with what the ranks know of one another; what ends the session on this one is said to the others."""
        try:
            yield
        except BaseException as error:
            for state in self._states.values():
                state.let_go()
            self._runs.fail(error)
            models = [(state.model, state.plan) for state in self._states.values()]
            explained = self._calls.explained(error) or explain_share(error, models)
            self._calls.close(error)
            self._runs.tell_failure()
            if explained is not None:
                raise explained from error
            raise
        else:
            self._calls.close()

    def wait_for_all(self) -> None:
        """Return when every rank has come to the end of its session."""
        with self._calls.call("the end of the session", meets=True):
            pass

    def refuse_foreign_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
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
        with self._calls.call("session.prepare()", meets=True), variables_kept(model, loss) as put_back:
            check_prepared(model, optimizer, loss, split, cut, vocabulary_head)
            refuse_wrapped(model)
            stream = BatchStream(loader, self._seed, lambda fields: None, batch_size)
            stream.warn_of_workers()
            self._refuse_taken(model)
            refuse_given(model, vocabulary_head, "before prepare")
            data = facts_of_data(stream, self._seed) if self.nets.data and self.world_size > 1 else {}
            check_same_facts({**facts_of_prepared(model, optimizer, stream, max_grad_norm), **data}, self.device)
            recipe = self._recipe(model, stream.batch_size, max_grad_norm)
            example = first_batch_of(loader)
            blueprint = self._blueprint(model, inputs, split, cut, vocabulary_head, example)
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
        if self._plan is not None:  # what is chosen here shares out data alone
            look_for_blocks(blueprint, self._plan)
        looks = look_first(blueprint, loss, example, self._plan, self.nets, self.device)
        given_loss, loss = loss, looks.declared(loss)
        plan = self._choose(recipe, blueprint, loss, example, looks)
        groups = group_indices(optimizer, model)
        check_dtypes(model, optimizer, plan)
        mesh = self._mesh(plan)
        given = (self._prove, self._quiet, recipe, plan, blueprint, mesh, put_back)
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
            self._meshes[plan.mesh] = Mesh(plan.mesh, self.device, timeout_seconds=self._timeout_seconds)
        return self._meshes[plan.mesh]

    def _recipe(self, model: nn.Module, batch: int, max_grad_norm: float | None) -> Recipe:
        """What the session knows, as a recipe: the checks of plans read it."""
        kind = type(model)
        base = Recipe(
            model=ModelRecipe(factory=f"{kind.__module__}:{kind.__qualname__.replace('<locals>', 'locals')}"),
            batch=BatchRecipe(global_batch_size=batch),
            run=RunRecipe(steps=1, seed=self._seed),
            permit=self._permit,
        )
        return replace(base, optimizer=replace(base.optimizer, max_grad_norm=max_grad_norm))

    def _blueprint(
        self,
        model: nn.Module,
        inputs: Mapping[str, str] | None,
        split: Sequence[SplitRule] | Mapping[str, Any],
        cut: CutTable | None,
        vocabulary_head: str | None,
        batch: UserBatch,
    ) -> Blueprint:
        example, shape = taken_apart(batch)
        if inputs is not None:
            check_inputs(inputs, model, shape)
        inputs = inputs or infer_inputs(model, shape)
        own = (
            [SplitRule(match=match, kind=kind) for match, kind in split.items()]
            if isinstance(split, Mapping)
            else split
        )
        tables = tables_of(model)
        # The family's head is split for a fused vocabulary loss; a loss of the user's own reads whole logits.
        known = [
            replace(rule, gather_output=True)
            if rule.match == tables.vocabulary_head and vocabulary_head is None
            else rule
            for rule in tables.split
        ]
        tables.split, tables.cut = (*own, *known), cut if cut is not None else tables.cut
        tables.vocabulary_head = vocabulary_head
        blueprint = Blueprint(
            **tables.of_tables,
            module=model,
            inputs=inputs,
            beside=shape.part,
            loss=_unset_loss,  # TrainState puts the user's own in its place
            initialise=None,
            example=lambda number: {
                name: torch.empty((number, *value.shape[1:]), dtype=value.dtype, device="meta")
                for name, value in example.items()
            },
        )
        if self._plan is not None and self._plan.mesh.tensor > 1 and (own or not blueprint.splits):
            look_at_user_model(blueprint, has_table=bool(own))
        return blueprint

    def _choose(
        self, recipe: Recipe, blueprint: Blueprint, loss: UserLoss, example: UserBatch, looks: FirstLooks
    ) -> Plan:
        facts, known = looks.facts(facts_of_blueprint(blueprint, recipe)), LossOfUser(loss)
        machine = machine_for(self._rank_info)
        reasons: Mapping[str, str] = {}
        plan, note = self._plan, ""
        if plan is None:
            known.like = shape_of(example)
            description = describe_user_model(replace(blueprint, loss=known), recipe)
            choice = choose_plan(
                recipe,
                machine.cluster,
                facts,
                self.world_size,
                profile=replace(description.profile, no_gathering=facts.no_gathering),
                given=looks.limits(self._given, self.world_size).pins(recipe.batch.global_batch_size, self.world_size),
            )
            plan = self._given.beyond(_with_timeout(choice.plan, self._timeout_seconds))
            reasons = choice.reasons
            note = "; ".join(description.notes)
        plan, reasons = complete_plan(plan, recipe, reasons, threads_of_user(), is_chosen=self._plan is None)
        looks.check(plan)
        check_no_loop(plan)
        check_plan(plan, recipe, facts, self.world_size)
        check_runnable(plan)
        check_same_on_all_ranks(recipe, plan)
        torch.set_num_threads(plan.compute.num_threads)
        if self.rank == 0 and not self._quiet:
            noted = [f"note      {note}"] if note else []
            print("\n".join([*describe_plan(plan, reasons, facts, machine.cluster), *noted]), flush=True)
        return plan


def _store_of_session(rank: int, num_ranks: int) -> dist.Store | None:
    """A store for one session's ranks alone: each counts there how many it has had."""
    if num_ranks == 1 or not dist.is_initialized():
        return None
    store = group_store()
    return dist.PrefixStore(f"weft/session/{store.add(f'weft/sessions/{rank}', 1)}", store)


def _with_timeout(plan: Plan, seconds: float | None) -> Plan:
    return plan if seconds is None else replace(plan, compute=plan.compute.waiting(seconds))


def _unset_loss(outputs: Any, batch: Any) -> Any:
    raise AssertionError("the loss is set by TrainState")
