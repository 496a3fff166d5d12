"""The loop over a recipe's steps on one rank: data, steps, evaluation, checkpoints, records, and stopping."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, cast

import torch
import torch.distributed as dist

from weft.checkpoint import Checkpointer, Json, SaveError
from weft.comm import Mesh
from weft.document import JsonObject
from weft.engine._learning_rate import learning_rate
from weft.engine._progress import ProgressPrinter, StepReport, format_loss
from weft.engine._setup import TrainingState
from weft.engine._signals import StopRequest
from weft.engine._step import StepResult
from weft.engine._throughput import ThroughputMeter, measure_peak_flops
from weft.errors import CheckpointError, RecipeError, WeftError
from weft.models import Batch
from weft.recipe import Recipe
from weft.record import MetricsWriter, Recorder, advise_bucket

logger = logging.getLogger(__name__)


class TrainingData(Protocol):
    """What the loop asks of the data, on one data rank."""

    def microbatches(self, step: int) -> Sequence[Batch]:
        """This data rank's microbatches of a step: a function of the step alone."""
        ...

    def evaluation(self, global_batches: int | None) -> Iterable[Sequence[Batch]]:
        """This data rank's share of the validation set, once through; equally many items on all data ranks."""
        ...

    def state(self, step: int) -> Mapping[str, Json]:
        """What must be known to go on with the data after `step` finished steps."""
        ...

    def step_of(self, state: Mapping[str, Json]) -> int:
        """The number of finished steps in a saved state, checked against these data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Optimizer steps finished, those before a resume included."""
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    seconds: float
    stopped_early: bool
    """A signal asked for it; everything is saved and the run can be resumed."""
    stop_signal: int
    """Number of the signal that did; 0 when the run was not stopped, or by the program itself."""
    losses: tuple[float, ...]
    """Of the steps of this call."""
    checkpoint: Path | None


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
        checkpointer: Checkpointer | None,
        metrics: MetricsWriter | None,
        stream: TextIO | None,
    ) -> None:
        """Join the parts.  `metrics` and `stream` are given on rank 0 only; without a checkpointer nothing is saved."""
        self._recipe = recipe
        self._training = training
        self._data = data
        self._mesh = mesh
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._metrics = metrics
        self._stream = stream
        self._sequence_length = training.model.blueprint.sequence_length
        self._first_step = 0
        self._saved_step: int | None = None
        self._skipped = 0
        self._skipped_in_a_row = 0

    def resume(self, which: Path | None = None) -> int:
        """Load the newest checkpoint, or the one given, and return its step.  Call on every rank.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit this recipe.
            RecipeError: it has done more steps than the recipe wants.
        """
        assert self._checkpointer is not None
        saved_after: list[int] = []

        def check(state: JsonObject, step: int) -> None:
            self._check_state(state, step)
            saved_after[:] = [step]

        where = which if which is not None else "latest"
        state = self._checkpointer.load(where, self._training.pieces(), check=check)
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
        self._skipped = cast(int, state["skipped_steps"])
        self._saved_step = self._first_step
        return self._first_step

    def _check_state(self, state: JsonObject, step: int) -> None:
        """Refuse what `_save` cannot have written after `step` steps."""
        state.only(("loss_scale", "data", "skipped_steps"), optional=("local_rounds",))
        state.count("skipped_steps", most=step)
        self._training.check_state(state)
        data = state.object("data")
        if "cursor" in data.values and (
            data.count("cursor") % max(step, 1) or (data.count("cursor") > 0) != (step > 0)
        ):
            raise data.fail("cursor", f"the samples of {step} steps, equally many in each")

    def run(self) -> Outcome:
        """Train to the recipe's last step, or until a signal.  Call on every rank.

        Raises:
            WeftError: too many steps in a row were not finite; what was saved before stays.
        """
        recipe, started = self._recipe, time.perf_counter()
        losses: list[float] = []
        validation: float | None = None
        step, stopped = self._first_step, False
        meter = ThroughputMeter(
            flops_per_sample=self._training.model.blueprint.flops_per_sample, peak_flops=self._measure_peak()
        )
        with StopRequest(announce=self._mesh.rank == 0) as stop, self._printer() or contextlib.nullcontext() as printer:
            while step < recipe.run.steps and not stopped:
                result = self._step(step, stop, meter)
                losses.append(result.loss)
                step += 1
                self._watch_for_skips(result, printer)
                self._report(step, result, meter, printer)
                stopped = result.stop
                if not stopped and self._due(step, recipe.run.evaluate_every):
                    validation = self._evaluate(step, printer)
                if stopped or self._due(step, recipe.run.save_every):
                    self._save(step, printer)
            if not stopped and recipe.run.evaluate_every is not None and not self._due(step, recipe.run.evaluate_every):
                validation = self._evaluate(step, printer)
            if self._saved_step != step:
                self._save(step, printer)
            number = self._agree_on_signal(stop) if stopped else 0
            self._advise(printer)
        return Outcome(
            steps=step,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            validation_loss=validation,
            seconds=time.perf_counter() - started,
            stopped_early=stopped and step < recipe.run.steps,
            stop_signal=number,
            losses=tuple(losses),
            checkpoint=self._checkpointer.latest() if self._checkpointer is not None else None,
        )

    # ── parts of the loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, step: int, stop: StopRequest, meter: ThroughputMeter) -> StepResult:
        started = time.perf_counter()
        with self._recorder.span("data_wait"):
            microbatches = self._data.microbatches(step)
        result = self._training.stepper(
            microbatches,
            step=step,
            learning_rate=learning_rate(self._recipe, step),
            stop_requested=lambda: stop.flag,
        )
        samples = self._recipe.batch.global_batch_size
        tokens = samples * self._sequence_length if self._sequence_length is not None else None
        meter.add(seconds=time.perf_counter() - started, samples=samples, tokens=tokens)
        return result

    def _watch_for_skips(self, result: StepResult, printer: ProgressPrinter | None) -> None:
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped += 1
        self._skipped_in_a_row += 1
        scale = f", loss scale {result.loss_scale:g}" if result.loss_scale != 1.0 else ""
        _say(
            printer,
            f"step {result.step + 1} skipped on all ranks: loss {result.loss}, gradient norm"
            f" {result.gradient_norm}{scale}",
        )
        limit = self._recipe.run.max_skipped_steps
        loss_scale = self._training.loss_scale
        may_still_fall = loss_scale is not None and loss_scale.scale > loss_scale.minimum
        if self._skipped_in_a_row > limit and not may_still_fall:
            raise WeftError(
                f"{self._skipped_in_a_row} steps in a row up to step {result.step + 1} had a loss or gradient that"
                f" is not finite (run.max_skipped_steps = {limit}), so training cannot go on."
                f" Lower optimizer.learning_rate = {self._recipe.optimizer.learning_rate:g}, lengthen warmup_steps,"
                " or look at the data of these steps."
            )

    def _report(
        self,
        step: int,
        result: StepResult,
        meter: ThroughputMeter,
        printer: ProgressPrinter | None,
    ) -> None:
        last = step == self._recipe.run.steps
        if not (last or result.stop or step == self._first_step + 1 or step % self._recipe.run.log_every == 0):
            if printer is not None:
                printer.advance(step)
            return
        rates, spans = meter.read(), self._recorder.end_step()
        traffic = self._recorder.collectives.end_step()
        if self._metrics is not None:
            self._metrics.write(
                {
                    "kind": "step",
                    "step": step,
                    "loss": result.loss,
                    "count": result.count,
                    "gradient_norm": result.gradient_norm,
                    "learning_rate": result.learning_rate,
                    "skipped": result.skipped,
                    "loss_scale": result.loss_scale,
                    "samples_per_second": rates.samples_per_second,
                    "tokens_per_second": rates.tokens_per_second,
                    "flops_per_second": rates.flops_per_second,
                    "peak_share": rates.peak_share,
                    "memory_bytes": result.memory_bytes,
                    "unix_time_seconds": time.time(),
                    **spans,
                    "communication": {axis: sums.as_metric() for axis, sums in traffic.items()},
                }
            )
        if printer is not None:
            constant = self._recipe.optimizer.schedule == "constant" and self._recipe.optimizer.warmup_steps == 0
            printer.report(
                StepReport(
                    step=step,
                    loss=result.loss,
                    tokens_per_second=rates.tokens_per_second,
                    samples_per_second=rates.samples_per_second,
                    peak_share=rates.peak_share,
                    memory_bytes=result.memory_bytes,
                    remaining_seconds=meter.remaining_seconds(self._recipe.run.steps - step),
                    learning_rate=None if constant else result.learning_rate,
                    skipped_steps=self._skipped,
                )
            )

    def _evaluate(self, step: int, printer: ProgressPrinter | None) -> float:
        with self._recorder.span("evaluation"):
            loss = self.evaluate()
        if self._metrics is not None:
            self._metrics.write({"kind": "evaluation", "step": step, "validation_loss": loss})
        _say(printer, f"step {step:4d}  validation loss {format_loss(loss)}")
        return loss

    def evaluate(self) -> float:
        """Return the loss over the validation set: global sum over global count, exact over uneven tails.

        With a moving average of the weights, it is the average that is evaluated; in the middle of a round of local
        steps, the weights that replicas agreed on last.  Call on every rank.
        """
        training, totals = self._training, torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        with training.evaluated():
            for microbatches in self._data.evaluation(self._recipe.run.evaluate_batches):
                found = training.model.runner.evaluate(microbatches, step=0, seed=self._recipe.run.seed)
                if self._mesh.index("tensor") == 0:
                    totals += torch.stack([found.sum, found.count])
        world = self._mesh["world"]
        if world.group is not None:
            dist.all_reduce(totals, group=world.group)
        loss_sum, count = totals.tolist()
        return loss_sum / count if count else math.nan

    def _save(self, step: int, printer: ProgressPrinter | None) -> None:
        if self._checkpointer is None:
            return
        state: dict[str, Json] = {
            **self._training.state(),
            "data": dict(self._data.state(step)),
            "skipped_steps": self._skipped,
        }
        with self._recorder.span("checkpoint"):
            try:
                path = self._checkpointer.save(step, self._training.pieces(), state)
            except SaveError as error:
                if not error.training_can_continue or step == self._recipe.run.steps:
                    raise
                _say(printer, f"warning: {error} Training goes on.")
                return
        self._saved_step = step
        _say(printer, f"step {step:4d}  saved {path}")

    def _advise(self, printer: ProgressPrinter | None) -> None:
        """Say on rank 0 whether other gradient buckets would have left less to wait for."""
        if self._mesh.rank != 0:
            return
        model = self._training.model
        outermost = next((each for each in model.module.parameters() if each.requires_grad), None)
        tail = outermost.numel() * model.dtypes.gradient.itemsize if outermost is not None else 0
        advice = advise_bucket(self._recorder, model.plan, tail_bytes=tail)
        if advice is not None:
            _say(printer, str(advice))

    def _due(self, step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _printer(self) -> ProgressPrinter | None:
        if self._stream is None:
            return None
        return ProgressPrinter(self._recipe.run.steps, first_step=self._first_step, stream=self._stream)

    def _agree_on_signal(self, stop: StopRequest) -> int:
        """The signal that some rank got: the others may not have, or not yet."""
        number = torch.tensor(stop.signal_number, device=self._mesh.device)
        world = self._mesh["world"]
        if world.group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=world.group)
        return int(number)

    def _measure_peak(self) -> float:
        """FLOP/s of matrix products of all ranks together, measured by all at once so that shared cores are shared."""
        world = self._mesh["world"]
        if world.group is not None:
            dist.barrier(group=world.group)
        peak = torch.tensor(
            [measure_peak_flops(self._mesh.device, self._training.model.dtypes.compute)],
            dtype=torch.float64,
            device=self._mesh.device,
        )
        if world.group is not None:
            dist.all_reduce(peak, group=world.group)
        return float(peak)


def _say(printer: ProgressPrinter | None, text: str) -> None:
    logger.info("%s", text)
    if printer is not None:
        printer.message(text)
