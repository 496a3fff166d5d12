"""What `session.prepare` returns: a model in training, driven by the user's own loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from weft.checkpoint import Json
from weft.comm import Mesh
from weft.engine import StepReporter, begin_training
from weft.entry._agreement import check_same_batches, check_same_facts, take_weights_of_rank_0
from weft.entry._arguments import check_draw, saved_path_of, whole_or_none
from weft.entry._attached import Attached
from weft.entry._batch_shape import BatchShape, taken_apart
from weft.entry._batch_shares import BatchShares
from weft.entry._calls import Calls
from weft.entry._copied_state import CopiedState
from weft.entry._epochs import Epochs
from weft.entry._evaluation import Evaluation
from weft.entry._export import export_model
from weft.entry._guards import Guard, LeftGradients, frozen
from weft.entry._loader_passes import LoaderPasses
from weft.entry._loop_draws import Yielded
from weft.entry._metrics import Metrics
from weft.entry._outputs import GatheredOutputs, Select, logits_alone, logits_and_labels
from weft.entry._recording import ModelRun
from weft.entry._rounds import RoundsOfSession
from weft.entry._saved_data import refuse_other_data
from weft.entry._saves import Saves
from weft.entry._seen_batches import SeenBatches
from weft.entry._user_batches import BatchStream, UserBatch, fields_of, trainable
from weft.entry._user_loss import LossOfUser
from weft.entry._user_optimizer import UserOptimizer, cuts_of, settings_of
from weft.events import CheckpointEvent, EndEvent, EpochEvent, EvaluationEvent, StepEvent
from weft.models import Batch, Blueprint
from weft.parallel import LossTotals, ParallelModel, parallelize
from weft.parallel.sample_draws import SampleDraws
from weft.plan import Plan
from weft.recipe import Recipe
from weft.record import Recorder

if TYPE_CHECKING:
    from weft.entry._manual import ManualStep
    from weft.entry._proof import SessionProof


class TrainState:
    """A model, its optimizer and its data under a plan.  Every method is called on every rank."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        plan: Plan,
        blueprint: Blueprint,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        groups: Mapping[str, int],
        stream: Iterable[UserBatch],
        loss: Callable[[Any, Any], Any],
        recorded: ModelRun,
        calls: Calls,
        rounds: RoundsOfSession,
        guard: Guard,
        number: int = 1,
        like: BatchShape,
        hint: str = "",
        proof: SessionProof | None = None,
    ) -> None:
        self.plan, self._calls = plan, calls
        self._name = "state" if number == 1 else f"(model {number}) state"
        self._guard = guard
        self.optimizer = optimizer
        self._mesh = mesh
        self._recipe, self._batch_size = recipe, recipe.batch.global_batch_size
        self._stream = BatchStream(stream, recipe.run.seed, self._check_equal, self._batch_size)
        self._loss = LossOfUser(loss, like, hint)
        self._yielded: Yielded | None = None
        self._draws = SampleDraws(recipe.run.seed)
        self._left: LeftGradients | None = None
        self._facts = dict[str, str]()
        blueprint = replace(blueprint, loss=self._loss, beside=self._loss.part)
        self._shares = BatchShares(plan, mesh.data_index, self._batch_size, blueprint)
        self._share = self._shares.usual
        take_weights_of_rank_0(blueprint.module, mesh.device, mesh["world"].group)
        self._blueprint = blueprint
        before = dict(blueprint.module.named_parameters())
        cuts = cuts_of(optimizer)
        self._parallel: ParallelModel = parallelize(
            blueprint,
            plan,
            mesh,
            seed=recipe.run.seed,
            group_parameters=lambda shapes: {name: groups[name] for name in shapes},
            cuts="anywhere" if cuts == "anywhere" else "parameter",
        )
        self._evaluation = Evaluation(self._parallel.runner, blueprint, self._loss, mesh, plan, recipe)
        self._optimizer = UserOptimizer(
            optimizer, self._parallel.stores.shards, order=[*groups], whole=cuts != "anywhere", guard=self._guard
        )
        self._recorder = Recorder()
        self._training = begin_training(recipe, self._parallel, self._optimizer, None, self._recorder)
        if proof is not None:
            proof.check(self._training, self._guard, self._recorder, self._loss)
        self._rounds = rounds.of(self._training, self._name, guard)
        self._run = recorded.run
        self._reporter = StepReporter(self._run, self._recorder, self._parallel)
        self._reporter.start(0, None)
        self._steps, self._attached = 0, Attached()
        self._seen = SeenBatches(shared_by_all=plan.mesh.data == 1 and plan.mesh.world_size > 1)
        self._passes = LoaderPasses(self._stream, self._seen)
        self._frozen = [name for name, value in blueprint.module.named_parameters() if not value.requires_grad]
        self._saves = Saves(recorded.checkpointer(mesh), self._training, self._optimizer, self._attached, mesh)
        self._copied = CopiedState(self._parallel)
        gathers = plan.data_parallel.shards_weights and mesh.size("shard") > 1
        self._guard.watch(self._parallel, before, recipe, gathers=gathers)
        calls.watch_exchanges(self.model, self._name, mesh, gathers=gathers, batch_norm=blueprint.has_batch_norm)

    @property
    def model(self) -> nn.Module:
        """The user's model; under a pipeline, this rank's stage of it."""
        return self._parallel.module

    @property
    def steps(self) -> int:
        """Finished steps."""
        return self._steps

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """Yield this rank's share of the coming global batches, in the shape that the loader gives.

        Without `steps`: until the next step's epoch is through.  After `load` it goes on where the run was.
        """
        return self._batches(whole_or_none("state.batches(steps=…)", steps))

    def _batches(self, steps: int | None) -> Iterator[Any]:
        epoch, step = self._epoch, self._steps
        if self._stream.num_samples is None:
            for batch in self._passes.batches(steps):
                yield self._share_of(batch)
        else:
            last = None if steps is None else step + steps
            while (last is None and self._stream.epoch_of(step) == epoch) or (last is not None and step < last):
                with self._recorder.span("data_wait"):
                    batch = self._stream.read(step, self._shares.usual.start, self._shares.usual.stop)
                yield self._handed_out(batch)
                step += 1
        if steps is None:
            self._run.emit(EpochEvent(step=self._steps, number=epoch))

    def step(self, batch: UserBatch) -> StepEvent:
        """Train on this rank's share of a global batch: forward, backward, reductions, clipping, the optimizer's step.
        `loss` and `count` of what it returns are of the whole global batch, on every rank; `len(batch)` is not.

        Raises:
            DataError: the share has another number of samples than the plan gives this rank.
            RecipeError: the ranks' optimizers have other settings or have done other numbers of steps; gradients are
                off, a parameter frozen at prepare is not any more, or gradients were changed (clipped) after a step.
        """
        self._check_ready("step()")
        with self._calls.call(f"{self._name}.step()", facts=lambda: self._facts), self._guard.inside():
            microbatches = self._taken(batch)
            event = self._training.stepper(microbatches, step=self._steps, **self._agreement())
        self._note(event)
        return event

    @contextmanager
    def manual_step(self, batch: UserBatch) -> Generator[ManualStep]:
        """A step whose forwards, losses and backwards the loop writes itself, as many as it likes of each::

            with state.manual_step(batch) as step:
                for part in step.parts():
                    first, second = model(part["image"]), model(part["other"])
                    step.backward(loss_a(first, part))
                    step.backward(loss_b(second, part))
            print(step.event.loss)

        Leaving the block reduces the gradients, clips them and does the optimizer's step, once.  Each loss is the mean
        over the samples of its part, or a sum beside the `step.total` that divides it, so that plans give the same
        gradients.  Nothing is reduced before the block ends, but under ZeRO-3, where every backward reduces.

        Raises:
            DataError: as `step`.
            RecipeError: as `step`; parts were left out, or a backward was not `step.backward`.
            PlanError: the plan cuts the model into stages or the sequence, the block draws random numbers, the loss of
                `prepare` is of the whole batch, or ZeRO-3's ranks have unequal shares.
        """
        from weft.entry._manual import ManualStep, check_manual  # loaded where a loop writes its own

        self._check_ready("manual_step()")
        check_manual(self.plan, self._blueprint.vocabulary_head, per_sample_loss=self._loss.per_sample)
        with self._calls.call(f"{self._name}.manual_step()"):
            microbatches = self._taken(batch)
            self._share.refuse_fillers("state.manual_step()")
            step = ManualStep(
                self._parallel,
                self._training.stepper,
                microbatches,
                step=self._steps,
                seed=self._recipe.run.seed,
                batch_size=self._share.size,
                like=self._loss.like,
                calls=self._calls,
                guard=self._guard,
            )
        with step.block(self._end_manually):
            yield step
        self._note(step.event)

    def _end_manually(self, totals: LossTotals) -> StepEvent:
        self._facts = self._settings()
        called = self._calls.call(f"the end of {self._name}.manual_step()", facts=lambda: self._facts)
        with called, self._guard.inside():
            return self._training.stepper.end(totals, step=self._steps, **self._agreement())

    def evaluate(
        self, loader: Iterable[UserBatch], metrics: Mapping[str, Any] | None = None, *, outputs: Select | None = None
    ) -> Any:
        """Return the mean loss over a loader, each sample counted once; `loader` must yield the same on all ranks.

        Every rank takes its share of each batch, also of a short last one.

        Args:
            loader: batches of any size.
            metrics: name → a function of (predictions, targets) of all samples, or an object with `update` and
                `compute`, such as a metric of torchmetrics, which is told of them batch by batch on every rank.  With
                metrics the result is a dictionary of their values and the `loss`.
            outputs: `outputs(model outputs, batch) -> (predictions, targets)` of a microbatch; by default the logits,
                and the batch's `labels` or last entry.

        Raises:
            DataError: the ranks were given other numbers of samples, or what `outputs` selects has no row per sample.
            RecipeError: a metric is none.
        """
        known = Metrics(metrics, outputs)
        collected = self._evaluation.outputs(outputs or logits_and_labels) if metrics else None
        recording = self._reporter.phase("evaluation")
        told = ", ".join(map(str, known.names))
        called = self._calls.call(f"{self._name}.evaluate({told})", meets=True)
        with called, self._guard.inside(), self._rounds.agreed("evaluate"), recording as seconds:
            totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
            for batch_totals in self._evaluation.run_through(loader, collected, counts=True):
                totals += batch_totals
                if collected is not None:
                    known.update(collected.join())
            world = self._mesh["world"]
            if world.group is not None:
                dist.all_reduce(totals, group=world.group)
            loss = float(totals[0] / totals[1]) if totals[1] else math.nan
            values = known.compute(collected.all()) if collected is not None else {}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._run.emit(EvaluationEvent(step=self._steps, validation_loss=loss, seconds=seconds(), metrics=numbers))
        return {"loss": loss, **values} if metrics else loss

    def predict(self, loader: Iterable[UserBatch], *, outputs: Select | None = None) -> Any:
        """Return the model's outputs for all samples of a loader, in its order, whole on every rank and on the CPU.

        Args:
            loader: batches of any size, the same on all ranks.
            outputs: `outputs(model outputs, batch)` of a microbatch: a tensor with a row for each sample, or a tuple or
                dictionary of such; by default the logits.

        Raises:
            DataError: what it selects has no row per sample, or rows of several shapes.
        """
        collected = self._evaluation.outputs(outputs or logits_alone)
        called = self._calls.call(f"{self._name}.predict()", meets=True)
        with called, self._guard.inside(), self._rounds.agreed("predict"):
            for _ in self._evaluation.run_through(loader, collected, counts=False):
                collected.join()
            return collected.all()

    def gather(self, value: Any) -> Any:
        """Return a tensor with a row for each sample of this rank's share, or a tuple or dictionary of such, for the
        whole batch, in its order, on every rank and on the CPU.

        Raises:
            DataError: on every rank: samples do not lie along dim 0, or other ranks gave other fields.
        """
        collected = GatheredOutputs(lambda outputs, batch: outputs, self._mesh)
        with self._calls.call(f"{self._name}.gather()", meets=True):
            collected.take(value)
            return collected.join()

    def randn(self, batch: UserBatch, *shape: int) -> Tensor:
        """Draw normal numbers for a batch of the coming step, (its samples, *shape): the same under every plan.

        Keyed by sample, as those of the model are; no generator moves.  Ranks draw in the same order.

        Raises:
            DataError: the batch is no share of a step.
        """
        return self._drawn(self._draws.randn(self._steps, self._samples(batch), check_draw("state.randn", shape)))

    def rand(self, batch: UserBatch, *shape: int) -> Tensor:
        """`randn`, of numbers in [0, 1)."""
        return self._drawn(self._draws.rand(self._steps, self._samples(batch), check_draw("state.rand", shape)))

    def randint(self, batch: UserBatch, high: int, *shape: int, low: int = 0) -> Tensor:
        """`randn`, of whole numbers (int64) from `low` to `high` − 1; at least one, or it is a DataError."""
        shape = check_draw("state.randint", shape, low, high)
        return self._draws.randint(self._steps, self._samples(batch), low, high, shape).to(self._mesh.device)

    def _drawn(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._mesh.device, torch.get_default_dtype())

    def attach(self, **objects: Any) -> None:
        """Save objects with the run from now on: schedulers, counters, whatever has `state_dict` and `load_state_dict`.

        `save` writes their states, which must be equal on all ranks, and `load` gives them back: attach before it.

        Raises:
            RecipeError: an object has no such methods or is saved anyway, or its name is taken.
        """
        self._attached.add(objects, saved_anyway=(self.model, self.optimizer))

    def epochs(self, number: int) -> Epochs:
        """Return the epochs up to `number`: `for epoch in state.epochs(3): for batch in epoch: state.step(batch)`.

        After `load` they begin with the epoch that the run was in.  `len(epoch)` is its number of steps, and
        `epoch.number` counts from 0.
        """
        return Epochs(self.batches, lambda: self._epoch, self._stream.epoch_length, number, self._rounds.end)

    def end_round(self) -> None:
        """Average the replicas now, though their round of local steps is not through (`weft.session(local_steps=…)`).

        Rounds end after every `local_steps` steps, with the last step of `epochs`, and where the session ends.  Until
        then `evaluate`, `predict` and `export` see what replicas agreed on last, and the model has this replica's own
        weights.  Nothing happens where no step was taken since, or the plan has no local steps.
        """
        self._guard.refuse_within_manual(f"{self._name}.end_round()")
        self._rounds.end()

    def save(self) -> Path:
        """Save model, optimizer, place in the data and what is attached; any later plan can load it.

        What a scheduler has made of the optimizer's settings is saved with them; its own state, if it is attached.

        Raises:
            RecipeError: on every rank; what is attached has other states on other ranks.
            CheckpointError: on every rank; it cannot be written.
        """
        place: dict[str, Json] = {
            "batch_size": self._batch_size,
            "num_samples": self._stream.num_samples,
            "seed": self._recipe.run.seed,
            **self._passes.state(),
        }
        recording = self._reporter.phase("checkpoint")
        with self._calls.call(f"{self._name}.save()", meets=True), self._guard.inside(), recording as seconds:
            path = self._saves.write(self._steps, place, self.optimizer)
        self._run.emit(CheckpointEvent(step=self._steps, path=str(path), seconds=seconds()))
        return path

    def export(self, folder: str | Path) -> Path:
        """Write the whole model as `transformers` loads it (safetensors, and `config.json` where it has one), under any
        plan; of a model with adapters, these alone, as `peft` loads them.  Call on every rank; all must see the folder.

        Raises:
            CheckpointError: on every rank; the folder is not empty or cannot be written.
        """
        called, peers = self._calls.call(f"{self._name}.export()", meets=True), self._saves.peers
        with called, self._guard.inside():
            self._rounds.warn("export")
            return export_model(self._training.weights(), self._parallel, self._steps, folder, peers, self.plan)

    def load(self, path: str | Path | None = None) -> int:
        """Load the newest save of this session's folder, or the one given, and return its number of steps.

        Raises:
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        self._guard.refuse_within_manual(f"{self._name}.load()")
        which = "latest" if path is None else saved_path_of(path)
        with self._calls.call(f"{self._name}.load()", meets=True), self._guard.inside():
            state = self._saves.read(which)
        refuse_other_data(
            state,
            batch_size=self._batch_size,
            num_samples=self._stream.num_samples,
            seed=self._recipe.run.seed,
        )
        self._steps = cast(int, state["steps"])
        self._passes.load(state)
        self._shares.forget()
        self._reporter.start(self._steps, None)
        return self._steps

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
        self.let_go()
        try:
            self._run.emit(EndEvent(step=self._steps, stopped=False))
        finally:  # whatever a callback raises
            self._training.close()

    def let_go(self) -> None:
        """Refuse no backward of the model any more: it may be prepared again, in another session.  Not collective."""
        self._guard.let_go()

    def _handed_out(self, batch: UserBatch) -> UserBatch:
        """A batch on its way to the loop; where others have other shares, the loop must draw nothing into it."""
        batch = trainable(batch)
        if self.plan.mesh.data > 1:
            self._yielded = Yielded(fields_of(batch), self._mesh.device)
        return batch

    def _share_of(self, batch: UserBatch) -> UserBatch:
        """This rank's share of a batch that every rank has whole."""
        own = self._shares.cut(batch, self._handed_out)
        self._seen.note(fields_of(own), self._stream.digest)
        return own

    def _check_ready(self, call: str) -> None:
        self._guard.check_ready(f"{self._name}.{call}", self.model, self._frozen, self._left)
        self._left, self._facts = None, {}  # until the step is through: one left by an error has changed gradients

    def _taken(self, batch: UserBatch) -> list[Batch]:
        """The microbatches of a share that a step takes."""
        batch = trainable(batch)
        fields, shape = taken_apart(batch)
        if self._yielded is not None:
            self._yielded.check(fields)
        self._seen.take(fields)
        self._share, self._loss.like = self._shares.find(fields), self._shares.with_spare(fields, shape)
        self._facts = self._settings()  # now: in the midst of a step a loss may switch what they speak of
        return self._shares.microbatches(fields, self._samples(batch))

    def _agreement(self) -> dict[str, Any]:
        """What every step compares and reports."""
        return {
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "fingerprint": float(xxhash.xxh64_intdigest(repr(self._facts).encode()) >> 12),
            "on_difference": lambda: check_same_facts(self._facts, self._mesh.device, self._mesh["world"].group),
        }

    def _note(self, event: StepEvent) -> None:
        self._steps += 1
        self._saves.warn_of_earlier(self._steps)
        self._left = self._guard.after_step(self.model, event)
        self._shares.took_step(self._share)
        self._reporter.step(event, samples=self._share.size)
        self._reporter.report()

    def _settings(self) -> dict[str, str]:
        """What must be equal on all ranks in a step."""
        return {
            "the number of finished steps": str(self._steps),
            "the model": self._name,
            "data: the batch of this step": self._seen.now,
            "the number of draws for this step": str(self._draws.drawn(self._steps)),
            **(settings_of(self.optimizer) | self._guard.facts()),
            **self._copied.facts(self._steps),
        }

    def _samples(self, batch: UserBatch) -> Tensor:
        """Numbers of this rank's samples of the coming step, which are those of a batch."""
        share = self._shares.find(fields_of(batch))
        return torch.arange(share.start, share.stop) + self._steps * self._batch_size

    @property
    def _epoch(self) -> int:
        """The epoch in which the next step lies."""
        return self._passes.number if (known := self._stream.epoch_of(self._steps)) is None else known

    def _check_equal(self, fields: Mapping[str, Tensor]) -> None:
        if (group := self._mesh["world"].group) is not None:
            with self._calls.call(f"{self._name}.batches()", meets=True):
                check_same_batches(fields, group)
