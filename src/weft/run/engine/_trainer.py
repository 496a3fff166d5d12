"""The loop over a recipe's steps on one rank: data, steps, evaluation, checkpoints, records, and stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder, StepTraffic
from weft.config.document import Json, JsonObject
from weft.config.recipe import Recipe, learning_rate
from weft.errors import CheckpointError, NotFiniteError, RecipeError
from weft.events import EndEvent, EvaluationEvent, MessageEvent, Run, RunFolder, StepEvent
from weft.model.blueprint import Batch
from weft.model.losses import count_labels
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.engine._report import StepReporter
from weft.run.engine._saves import TrainingSaves
from weft.run.engine._setup import TrainingState
from weft.run.engine._signals import StopRequest
from weft.run.launch import HAND_OVER
from weft.techniques.registry import saved_states

if TYPE_CHECKING:
    from weft.run.data.ledger import SampleLedger

_TRAFFIC_STEPS = 100
"""Number of reported steps, from the first on, whose traffic is kept."""


class TrainingData(Protocol):
    """The data of one data rank, as the loop needs them."""

    def microbatches(self, step: int) -> Sequence[Batch]:
        """This data rank's microbatches of a step: a function of the step alone."""
        ...

    def evaluation(self, global_batches: int | None) -> Iterable[Sequence[Batch]]:
        """This data rank's share of the validation set, once through; equally many items on all data ranks."""
        ...

    def state(self, step: int) -> Mapping[str, Json]:
        """Return the state that a checkpoint keeps to go on with the data after `step` finished steps."""
        ...

    def step_of(self, state: Mapping[str, Json]) -> int:
        """The number of finished steps in a saved state, checked against these data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a run."""

    steps: int
    """Finished optimizer steps, those before a resume included."""
    losses: tuple[float, ...]
    """Global mean loss of each step of this call."""
    validation_loss: float | None
    seconds: float
    stopped_early: bool
    """A signal stopped it; everything is saved, and the run can be resumed."""
    stop_signal: int
    """Number of that signal; 0 when the run was not stopped, or by the program itself."""
    checkpoint: Path | None
    traffic: tuple[StepTraffic, ...]
    """Traffic of rank 0 in the first steps that were reported and not skipped; empty if groups cannot be observed."""


class Trainer:
    """Runs a training on one rank.  Create on every rank, then call `run` on every rank."""

    def __init__(
        self,
        recipe: Recipe,
        training: TrainingState,
        data: TrainingData,
        mesh: Mesh,
        recorder: Recorder,
        *,
        checkpointer: TieredCheckpointer | None,
        run: Run | None = None,
        ledger: SampleLedger | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        """Join the parts.  What happens is said through `run`; without a checkpointer nothing is saved.  `ledger` keeps
        which samples were in each step, and `folder` is the run's, where profiles may be asked for."""
        self._recipe = recipe
        self._training = training
        self._data = data
        self._mesh = mesh
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._run = run if run is not None else Run(mesh.rank)
        self._ledger = ledger
        self._reporter = StepReporter(self._run, recorder, training, profiled=folder)
        self._traffic: list[StepTraffic] = []
        self._first_step = 0
        self._saves = (
            TrainingSaves(
                checkpointer,
                training,
                data.state,
                self._reporter,
                self._run,
                num_steps=recipe.run.steps,
                rank=mesh.rank,
            )
            if checkpointer is not None
            else None
        )
        self._skipped_in_a_row = 0

    def resume(self, which: Path | None = None) -> int:
        """Load the newest checkpoint, or the one given, and return its step.  Call on every rank.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit this recipe.
            RecipeError: it has done more steps than the recipe wants.
        """
        assert self._checkpointer is not None
        # The checkpointer may fall back to an older checkpoint, so the step comes from the one that was checked last.
        saved_after: list[int] = []

        def check(state: JsonObject, step: int) -> None:
            self._check_state(state, step)
            saved_after[:] = [step]

        where = which if which is not None else "latest"
        state = self._checkpointer.load(where, self._training.checkpoint_shards(), check=check)
        self._training.restored(state)
        saved = cast("Mapping[str, Json]", state["data"])
        self._first_step = self._data.step_of(saved)
        if self._first_step != saved_after[0]:
            raise CheckpointError(
                f"the run was saved after {saved_after[0]} steps and {saved.get('cursor')} samples, which are"
                f" {self._first_step} steps of batch.global_batch_size = {self._recipe.batch.global_batch_size}."
                " Go on with the batch size that saved it, or start a new run."
            )
        if self._first_step > self._recipe.run.steps:
            raise RecipeError(
                f"the checkpoint has done {self._first_step} steps, and run.steps = {self._recipe.run.steps}: there is"
                f" nothing left to train, and its schedule would have ended before. Set run.steps above"
                f" {self._first_step}, or resume from an earlier checkpoint."
            )
        self._training.stepper.num_skipped = cast(int, state["skipped_steps"])
        assert self._saves is not None
        self._saves.saved_step = self._first_step
        return self._first_step

    def _check_state(self, state: JsonObject, step: int) -> None:
        """Refuse what `_save` cannot have written after `step` steps."""
        state.only(("loss_scale", "data", "skipped_steps"), optional=saved_states())
        state.count("skipped_steps", most=step)
        self._training.check_state(state)
        data = state.object("data")
        if "cursor" in data.values and (
            data.count("cursor") % max(step, 1) or (data.count("cursor") > 0) != (step > 0)
        ):
            raise data.fail("cursor", f"the samples of {step} steps, equally many in each")

    def run(self, until: int | None = None, *, peak_flops: float | None = None) -> TrainingResult:
        """Train to the recipe's last step, or until a signal.  Call on every rank.

        Args:
            until: finished steps after which to save and return, though the recipe has more: the ranks are to go on
                under another plan.
            peak_flops: FLOP/s of matrix products of all ranks together, where they are known; by default they are
                measured first.

        Raises:
            NotFiniteError: too many steps in a row were not finite; what was saved before stays.
        """
        recipe, started = self._recipe, time.perf_counter()
        last = recipe.run.steps if until is None else min(until, recipe.run.steps)
        losses: list[float] = []
        validation: float | None = None
        step, stopped, number = self._first_step, False, 0
        reporter = self._reporter
        reporter.measure_peak(peak_flops)
        saves = self._saves
        if saves is not None:
            saves.begin(self._first_step)
        if self._ledger is not None:
            self._ledger.begin(self._first_step)
        with StopRequest(announce=self._mesh.rank == 0) as stop:
            reporter.start(
                self._first_step, recipe.run.steps, recipe.batch.global_batch_size
            )  # from now on this rank may get signals
            while step < last and not stopped:
                result = self._step(step, stop)
                losses.append(result.loss)
                step += 1
                self._refuse_endless_skips(result)
                # Some rank's signal, summed with the step: all ranks leave the loop after the same step.
                stopped = result.stop
                if stopped:
                    number = stop.agreed(self._mesh.device, self._mesh["world"].group)
                if self._reports(step) or stopped:
                    reporter.report(recipe.run.steps - step)
                goes_on = not stopped or number == HAND_OVER
                if goes_on and self._due(step, recipe.run.evaluate_every):
                    validation = self._evaluate(step)
                if saves is None:
                    continue
                # Evaluation comes first: where both are due, the line in the log has the loss of the weights that are
                # saved.
                if stopped or self._due(step, recipe.run.save_every):
                    # Ranks that hand over are followed by others, who read what lies in memory.
                    self._save(saves, step, at_once=step == last or (stopped and number != HAND_OVER))
                else:
                    saves.after_step(step)
            is_done = step == recipe.run.steps and (not stopped or number == HAND_OVER)
            if is_done and recipe.run.evaluate_every is not None and not self._due(step, recipe.run.evaluate_every):
                validation = self._evaluate(step)
            if saves is not None and saves.saved_step != step:
                self._save(saves, step, at_once=True)
            reporter.report(recipe.run.steps - step)
            self._advise()
            reporter.end()
        self._run.emit(EndEvent(step=step, stopped=stopped))
        return TrainingResult(
            steps=step,
            validation_loss=validation,
            seconds=time.perf_counter() - started,
            stopped_early=stopped and step < recipe.run.steps,
            stop_signal=number,
            losses=tuple(losses),
            checkpoint=self._checkpointer.latest() if self._checkpointer is not None else None,
            traffic=tuple(self._traffic),
        )

    # ── parts of the loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, step: int, stop: StopRequest) -> StepEvent:
        self._reporter.begin()
        with self._recorder.span("data_wait"):
            microbatches = self._data.microbatches(step)
        self._recorder.collectives.take_launched()  # what was sent until now is no step's
        self._training.model.take_rows()
        result = self._training.stepper(
            microbatches,
            step=step,
            learning_rate=learning_rate(self._recipe, step),
            stop_requested=lambda: stop.flag,
            asks_routing=self._reports(step + 1),
        )
        if self._mesh.rank == 0 and self._reports(step + 1) and not result.skipped:
            self._note_traffic(step, result, microbatches)
        if self._ledger is not None:
            # Before any save of this step: what is saved has its lines.
            self._ledger.add(step + 1, microbatches, skipped=result.skipped)
        self._reporter.step(result, samples=self._recipe.batch.global_batch_size)
        return result

    def _save(self, saves: TrainingSaves, step: int, *, at_once: bool) -> None:
        if self._ledger is not None:
            self._ledger.sync()
        saves.save(step, at_once=at_once)

    def _note_traffic(self, step: int, result: StepEvent, microbatches: Sequence[Batch]) -> None:
        """Keep what a step launched, where groups are watched."""
        launched = self._recorder.collectives.take_launched()
        rows = self._training.model.take_rows()
        if launched and len(self._traffic) < _TRAFFIC_STEPS:
            self._traffic.append(
                StepTraffic(
                    step=step,
                    is_first=step == self._first_step,
                    some_unused=result.some_unused,
                    labels=tuple(count_labels(self._training.model.held_fields(batch)) for batch in microbatches),
                    rows=rows,
                    sent=tuple((*kind, count) for kind, count in launched.items()),
                )
            )

    def _refuse_endless_skips(self, result: StepEvent) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        limit = self._recipe.run.max_skipped_steps
        loss_scale = self._training.loss_scale
        batch = self._recipe.batch.global_batch_size
        # fp16 skips on purpose while its loss scale falls; only at the minimum do skips say that training diverges.
        may_still_fall = loss_scale is not None and loss_scale.scale > loss_scale.minimum
        if self._skipped_in_a_row > limit and not may_still_fall:
            raise NotFiniteError(
                f"{self._skipped_in_a_row} steps in a row up to step {result.step} had a loss or gradient that"
                f" is not finite (run.max_skipped_steps = {limit}), so training cannot go on."
                f" Lower optimizer.learning_rate = {self._recipe.optimizer.learning_rate:g}, lengthen warmup_steps,"
                f" or look at the data of these steps: samples {(result.step - self._skipped_in_a_row) * batch:,} to"
                f" {result.step * batch - 1:,} of the order."
            )

    def _reports(self, step: int) -> bool:
        run = self._recipe.run
        return step in (run.steps, self._first_step + 1) or step % run.log_every == 0

    def _evaluate(self, step: int) -> float:
        with self._reporter.phase("evaluation") as seconds:
            loss = self.evaluate()
        self._run.emit(EvaluationEvent(step=step, validation_loss=loss, seconds=seconds()))
        return loss

    def evaluate(self) -> float:
        """Return the loss over the validation set: global sum over global count, exact over uneven tails.

        With a moving average of the weights, it is the average that is evaluated; in the middle of a round of local
        steps, the weights that replicas agreed on last.  Call on every rank.
        """
        training, totals = self._training, torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        with training.evaluated():
            for microbatches in self._data.evaluation(self._recipe.run.evaluate_batches):
                batch_totals = training.model.runner.evaluate(microbatches, step=0, seed=self._recipe.run.seed)
                totals += batch_totals.addend(self._mesh)
                if self._recorder.progress is not None:
                    self._recorder.progress.moved()
        world = self._mesh["world"]
        if world.group is not None:
            dist.all_reduce(totals, group=world.group)
        loss_sum, count = totals.tolist()
        return loss_sum / count if count else math.nan

    def _advise(self) -> None:
        """Say on rank 0 whether other gradient buckets would have left less to wait for."""
        if self._mesh.rank != 0:
            return
        from weft.techniques.buckets.advice import advise_bucket  # loaded when a run ends, by one rank

        model = self._training.model
        outermost = next((parameter for parameter in model.module.parameters() if parameter.requires_grad), None)
        tail = outermost.numel() * model.dtypes.gradient.itemsize if outermost is not None else 0
        advice = advise_bucket(self._recorder, model.plan, tail_bytes=tail)
        if advice is not None:
            self._run.emit(MessageEvent(text=str(advice), source=__name__))

    def _due(self, step: int, every: int | None) -> bool:
        return every is not None and step % every == 0
