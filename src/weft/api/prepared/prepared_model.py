"""A model and its optimizer under a plan, whoever writes the loop."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import nn

from weft.api.batches.losses import LossOfUser
from weft.api.guards.gradients import LeftGradients
from weft.api.guards.model_guard import Guard, frozen
from weft.api.guards.state_checks import CopiedState
from weft.api.planning.session_plan import UserLoss
from weft.api.ranks.agreement import check_same_facts, take_weights_of_rank_0
from weft.api.ranks.calls import RankCalls
from weft.api.ranks.recording import ModelRun
from weft.api.saving.export import export_model
from weft.api.saving.optimizer import UserOptimizer, cuts_of, settings_of
from weft.api.saving.saves import Saves
from weft.api.saving.stateful import ATTACHED, StatefulObjects
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.document import Json
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import CheckpointError, RecipeError
from weft.events import CheckpointEvent, EndEvent, StepEvent
from weft.model.blueprint import Blueprint
from weft.run.data.preparation import path_of
from weft.run.engine import StepReporter, TrainingState, begin_training
from weft.techniques.build import ParallelModel, parallelize

if TYPE_CHECKING:
    from weft.api.batches.trained_samples import TrainedSamples
    from weft.api.preflight.proof import SessionProof


class ReplicaRounds:
    """The rounds of one prepared model.  Under plans whose replicas meet in every step nothing here does anything."""

    def __init__(self, training: TrainingState, calls: RankCalls, name: str, guard: Guard) -> None:
        self._training: TrainingState | None = training
        self._calls, self._name, self._guard = calls, name, guard
        self._length = training.model.plan.data_parallel.round_length
        self._told: set[str] = set()

    @contextmanager
    def agreed(self, method: str) -> Generator[None]:
        """Give the model the weights that replicas agreed on last, within, for `method` to read. Enter and leave on
        every rank."""
        if self._training is None or not self._training.is_open:
            yield
            return
        self.warn(method)
        with self._training.evaluated():
            yield

    def warn(self, method: str) -> None:
        """Warn once that a method reads the weights that replicas agreed on last, if they have taken steps since."""
        if self._training is not None and self._training.is_open and method not in self._told:
            self._told.add(method)
            warnings.warn(
                f"{self._name}.{method}() is in the middle of a round of {self._length} local steps: it sees the"
                " weights that replicas agreed on last, without what they have learnt since. Call"
                f" {self._name}.end_round() before it to have them averaged now.",
                stacklevel=4,
            )

    def end(self) -> None:
        """Average the replicas, if they have taken steps since they last did.  Call on every rank."""
        if self._training is not None and self._training.is_open:
            with self._calls.call(f"the last average of {self._name}", meets=True), self._guard.inside():
                self._training.finish()

    def close(self) -> None:
        """`end`; no steps follow, and the training is let go."""
        self.end()
        self._training = None


class SessionRounds:
    """The rounds of all models of a session, in the order in which they were prepared: what ends them holds them, also
    where the loop has let go of a state, because garbage is collected at other times on other ranks."""

    def __init__(self, calls: RankCalls) -> None:
        self._calls = calls
        self._all: list[ReplicaRounds] = []

    def of(self, training: TrainingState, name: str, guard: Guard) -> ReplicaRounds:
        """Return those of a model, whose guard knows that Weft itself averages."""
        made = ReplicaRounds(training, self._calls, name, guard)
        if training.model.plan.data_parallel.replicas_step_alone:
            self._all.append(made)
        return made

    def close(self) -> None:
        """End every model's last round.  Call on every rank."""
        for rounds in self._all:
            rounds.close()
        self._all.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model with the plan that it is to be brought under, before anything of it is touched."""

    recipe: Recipe
    plan: Plan
    blueprint: Blueprint
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    groups: dict[str, int]
    loss: UserLoss
    """The loss, which says of itself what looking has found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedParts:
    """The parts of a prepared model, alike on every rank."""

    planned: PlannedModel
    loss: LossOfUser
    recorded: ModelRun
    calls: RankCalls
    rounds: SessionRounds
    guard: Guard
    name: str
    """How messages call it."""
    proof: SessionProof | None = None


class PreparedModel:
    """A model and its optimizer under a plan.  Every method is called on every rank."""

    _can_go_on = False
    """Whether a supervisor can start the script again, and the loop goes on."""
    _ledger: TrainedSamples | None = None
    """Writes down the samples of each step; None where the session was not asked to."""

    def __init__(self, parts: PreparedParts, nominal_count: float | None = None) -> None:
        """`nominal_count`: see `begin_training`."""
        planned = parts.planned
        recipe, plan, mesh, optimizer = planned.recipe, planned.plan, planned.mesh, planned.optimizer
        self.plan, self._calls, self._name, self._guard = plan, parts.calls, parts.name, parts.guard
        self._mesh, self._recipe, self._loss = mesh, recipe, parts.loss
        self.optimizer = optimizer
        """The optimizer that was prepared.  Its settings are the loop's to change, as a scheduler does; its `step` is
        the model's."""
        self._left: LeftGradients | None = None
        """Gradients that the last step has left in the model, for the next step to look at."""
        self._facts = dict[str, str]()
        self._blueprint = blueprint = replace(planned.blueprint, loss=self._loss, beside=self._loss.part)
        take_weights_of_rank_0(blueprint.module, mesh.device, mesh["world"].group)
        before = dict(blueprint.module.named_parameters())
        cuts = cuts_of(optimizer)
        self._parallel: ParallelModel = parallelize(
            blueprint,
            plan,
            mesh,
            seed=recipe.run.seed,
            group_parameters=lambda shapes: {name: planned.groups[name] for name in shapes},
            cuts="anywhere" if cuts == "anywhere" else "parameter",
        )
        shards, order = self._parallel.stores.shards, [*planned.groups]
        self._optimizer = UserOptimizer(optimizer, shards, order=order, whole=cuts != "anywhere", guard=self._guard)
        self._recorder = Recorder(progress=parts.recorded.progress, ring=parts.recorded.ring)
        self._training = begin_training(recipe, self._parallel, self._optimizer, None, self._recorder, nominal_count)
        if parts.proof is not None:
            parts.proof.check(self._training, self._guard, self._recorder, self._loss)
        self._rounds = parts.rounds.of(self._training, self._name, self._guard)
        self._run = parts.recorded.run
        self._samples_per_step = recipe.batch.global_batch_size
        profiled = parts.recorded.folder if parts.recorded.ring is not None else None
        self._reporter = StepReporter(self._run, self._recorder, self._training, profiled=profiled)
        self._supervised = parts.recorded.supervised
        self._is_to_go_on = self._can_go_on and self._supervised is not None and self._supervised.goes_on
        """Whether an earlier generation's save is still to be taken up."""
        self._has_gone_on = False
        if not self._is_to_go_on:
            self._reporter.start(0, None, recipe.batch.global_batch_size)
        self._steps, self._attached = 0, StatefulObjects(ATTACHED)
        self._frozen = [name for name, value in blueprint.module.named_parameters() if not value.requires_grad]
        durable = parts.recorded.checkpointer(mesh)
        tiers = parts.recorded.tiers(durable) if self._can_go_on else None
        self._saves = Saves(durable, self._training, self._optimizer, self._attached, mesh, tiers)
        self._copied = CopiedState(self._parallel)
        gathers = plan.data_parallel.shards_weights and mesh.size("shard") > 1
        self._guard.watch(self._parallel, before, recipe, self._optimizer.held, gathers=gathers)
        self._calls.watch_exchanges(self.model, self._name, mesh, gathers=gathers, batch_norm=blueprint.has_batch_norm)

    @property
    def model(self) -> nn.Module:
        """The user's model; under a pipeline, this rank's stage of it."""
        return self._parallel.module

    @property
    def steps(self) -> int:
        """Finished steps."""
        self._take_up()
        return self._steps

    def attach(self, **objects: Any) -> None:
        """Save objects with the run from now on: schedulers, counters, whatever has `state_dict` and `load_state_dict`.

        `save` writes their states, which must be equal on all ranks, and `load` gives them back: attach before it.

        Raises:
            RecipeError: an object has no such methods or is saved anyway, or its name is taken.
        """
        if not objects:
            raise RecipeError("state.attach() was given nothing. Name what to save: state.attach(scheduler=scheduler).")
        if self._has_gone_on:
            raise RecipeError(
                f"{self._name}.attach() came after the state had been taken up that an earlier start of the script has"
                " saved. Attach objects right behind session.prepare."
            )
        self._attached.add(objects, saved=(self.model, self.optimizer))

    def end_round(self) -> None:
        """Average the replicas now, though their round of local steps is not through (`weft.session(local_steps=…)`).

        Rounds end after every `local_steps` steps, with the last step of `epochs`, and where the session ends.  Until
        then `evaluate`, `predict` and `export` see what replicas agreed on last, and the model has this replica's own
        weights.  Nothing happens where no step was taken since, or the plan has no local steps.
        """
        self._take_up()
        self._guard.refuse_within_manual(f"{self._name}.end_round()")
        self._rounds.end()

    def save(self) -> Path:
        """Save model, optimizer, place in the data and what is attached; any later plan can load it.

        What a scheduler has made of the optimizer's settings is saved with them; its own state, if it is attached.

        Raises:
            RecipeError: on every rank; what is attached has other states on other ranks.
            CheckpointError: on every rank; it cannot be written.
        """
        self._take_up()
        if self._ledger is not None:
            self._ledger.sync()
        recording = self._reporter.phase("checkpoint")
        with self._calls.call(f"{self._name}.save()", meets=True), self._guard.inside(), recording as seconds:
            path = self._saves.write(self._steps, self._place(), self.optimizer)
        self._run.emit(CheckpointEvent(step=self._steps, path=str(path), seconds=seconds()))
        self._note_saved()
        return path

    def _note_saved(self) -> None:
        """Note that this run's newest save, or one that it has loaded, is the newest in its folder."""
        if self._can_go_on and self._supervised is not None and not self._supervised.has_saved:
            self._supervised.saved()
            self._saves.begin_snapshots(self._steps)

    def export(self, folder: str | Path) -> Path:
        """Write the whole model as `transformers` loads it (safetensors, and `config.json` where it has one), under any
        plan; of a model with adapters, these alone, as `peft` loads them.  Call on every rank; all must see the folder.

        Raises:
            CheckpointError: on every rank; the folder is not empty or cannot be written.
        """
        self._take_up()
        called, peers = self._calls.call(f"{self._name}.export()", meets=True), self._saves.peers
        with called, self._guard.inside():
            self._rounds.warn("export")
            return export_model(self._training.weights(), self._parallel, self._steps, folder, peers, self.plan)

    def load(self, path: str | Path | None = None) -> int:
        """Load the newest save of this session's folder, or the one given, and return its number of steps.

        Raises:
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        if self._is_to_go_on:  # whatever the script began from, an earlier start of it has come further
            self._take_up()
            return self._steps
        self._guard.refuse_within_manual(f"{self._name}.load()")
        which = "latest" if path is None else path_of("state.load(path)", path, CheckpointError)
        with self._calls.call(f"{self._name}.load()", meets=True), self._guard.inside():
            state = self._saves.read(which)
        self._loaded(state)
        if path is None:
            self._note_saved()
        # What lies in memory is of steps that the loop has gone back from.
        self._saves.snapshot(self._steps, self._place, self.optimizer, at_once=True)
        return self._steps

    def _snapshot(self) -> None:
        """Save into memory, where a snapshot is due."""
        if self._supervised is not None and self._supervised.has_saved:
            with self._reporter.phase("checkpoint"), self._guard.inside():
                self._saves.snapshot(self._steps, self._place, self.optimizer, at_once=False)

    def _take_up(self) -> None:
        """Go on from the newest save of an earlier start of the script, once, where there was one."""
        if not self._is_to_go_on:
            return
        self._is_to_go_on, self._has_gone_on = False, True
        with self._calls.call(f"the first use of {self._name} after a restart", meets=True), self._guard.inside():
            state = self._saves.read("latest")
        self._loaded(state)
        assert self._supervised is not None
        self._saves.begin_snapshots(self._steps)
        self._supervised.went_on(self._steps, self.plan)

    def _loaded(self, state: Mapping[str, Json]) -> None:
        """Go on where a save was made, whose model was filled."""
        self._go_on(state)
        self._steps = cast(int, state["steps"])
        self._reporter.start(self._steps, None, self._samples_per_step)

    @contextmanager
    def frozen(self) -> Generator[nn.Module]:
        """The model without gradients for its parameters, as the fixed side of another model's loss.

        Gradients still flow through it to its inputs: an adversary, a teacher, a critic.

        Raises:
            PlanError: under a pipeline, where no rank has the whole model.
        """
        with frozen(self.plan, [part.module for part in self._parallel.parts]):
            yield self.model

    def close(self) -> None:
        """End what runs in the background, and the last round of local steps; no steps follow.  Leaving the session
        does it."""
        if self._guard.is_closed:
            return
        self._rounds.close()
        self._guard.is_closed = True
        self._guard.restore()
        try:
            self._reporter.report()
            self._run.emit(EndEvent(step=self._steps, stopped=False))
            self._reporter.end()
        finally:  # whatever a callback raises
            if self._ledger is not None:
                self._ledger.close()
            self._training.close()

    def _place(self) -> dict[str, Json]:
        """Return the place of the run in its data, for a save."""
        return {}

    def _go_on(self, state: Mapping[str, Json]) -> None:
        """Go on in the data where a save was made.

        Raises:
            CheckpointError: it was of other data.
        """

    def _check_ready(self, call: str) -> None:
        self._guard.check_ready(f"{self._name}.{call}", self.model, self._frozen, self._left)
        self._reporter.enter_step()
        self._left, self._facts = None, {}  # until the step is through: one left by an error has changed gradients

    def _agreement(self) -> dict[str, Any]:
        """Return the facts that every step compares and reports."""
        return {
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "fingerprint": float(xxhash.xxh64_intdigest(repr(self._facts).encode()) >> 12),
            "on_difference": lambda: check_same_facts(self._facts, self._mesh.device, self._mesh["world"].group),
        }

    def _note(self, event: StepEvent, samples: int) -> None:
        self._steps += 1
        self._saves.warn_of_earlier(self._steps)
        self._guard.after_step(event)
        self._reporter.step(event, samples=samples)
        if self._reports_now():
            self._reporter.report()
        self._reporter.leave_step()

    def _reports_now(self) -> bool:
        """Whether what the last steps took is said behind this one."""
        return True

    def _settings(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks in a step."""
        return {
            "the number of finished steps": str(self._steps),
            "the model": self._name,
            **self._data_facts(),
            **(settings_of(self.optimizer) | self._guard.facts()),
            **self._copied.facts(self._steps),
        }

    def _data_facts(self) -> dict[str, str]:
        """Return the facts of the data that must be equal on all ranks."""
        return {}
