"""What `session.prepare` with a loss returns: a model in training, whose whole steps are Weft's."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.api.batches.batch_shape import taken_apart
from weft.api.batches.batch_shares import BatchShares
from weft.api.batches.loop_draws import YieldedBatch
from weft.api.batches.outputs import GatheredOutputs, Select, logits_alone, logits_and_labels
from weft.api.batches.passes import Epochs, LoaderPasses, refuse_other_data
from weft.api.batches.stream import (
    BatchStream,
    UserBatch,
    fields_of,
    trainable,
)
from weft.api.batches.trained_samples import TrainedSamples
from weft.api.guards.gradients import LeftGradients
from weft.api.planning.arguments import check_draw, integer_or_none
from weft.api.prepared.evaluation import Evaluation, Metrics
from weft.api.prepared.prepared_model import PreparedModel, PreparedParts
from weft.api.ranks.agreement import check_same_batches
from weft.config.document import Json
from weft.errors import RecipeError
from weft.events import EpochEvent, EvaluationEvent, StepEvent
from weft.model.blueprint import Batch
from weft.run.checkpoint import SaveError
from weft.run.launch import HAND_OVER
from weft.techniques.core import LossTotals
from weft.techniques.randomness.sample_draws import SampleDraws

if TYPE_CHECKING:
    from weft.api.prepared.manual_step import ManualStep

logger = logging.getLogger(__name__)


class TrainState(PreparedModel):
    """A model, its optimizer and its data under a plan.  Every method is called on every rank."""

    _can_go_on = True

    def __init__(self, parts: PreparedParts, stream: Iterable[UserBatch]) -> None:
        super().__init__(parts)
        self._is_stopping = self._knows_step = False
        self._is_resumed = self._is_to_go_on
        """Whether the loop has not begun since an earlier start of the script was gone on from."""
        self._open_epoch: int | None = None
        """Epoch whose batches are being handed out."""
        self._unfinished: int | None = None
        """Epoch whose batches are all taken, and behind whose last the loop has not come."""
        plan, mesh, recipe = parts.planned.plan, parts.planned.mesh, parts.planned.recipe
        self._batch_size = recipe.batch.global_batch_size
        self._stream = BatchStream(stream, recipe.run.seed, self._check_equal, self._batch_size)
        self._yielded: YieldedBatch | None = None
        self._draws = SampleDraws(recipe.run.seed)
        self._shares = BatchShares(plan, mesh.data_index, self._batch_size, self._blueprint)
        self._share = self._shares.usual
        self._evaluation = Evaluation(self._parallel.runner, self._blueprint, self._loss, mesh, plan, recipe)
        self._digest = ""
        """Digest of the batch of the coming step, where all ranks must have the same."""
        self._passes = LoaderPasses(self._stream)
        self._named: list[tuple[str, nn.Parameter]] = []
        """The model's parameters by name, once it has taken a step."""
        if (recorded := parts.recorded).keeps_ledger:
            self._ledger = TrainedSamples(recorded.folder.path, recorded.lock, self._stream, mesh, self._shares.usual)

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """Yield this rank's share of the coming global batches, in the shape that the loader gives.

        Without `steps`: until the next step's epoch is through.  After `load` it goes on where the run was.
        """
        steps = integer_or_none("state.batches(steps=…)", steps)
        self._take_up()
        self._refuse_counting(steps)
        if steps is not None or not self._has_gone_on:
            self._unfinished = None
        return self._batches(steps)

    @property
    def steps(self) -> int:
        """Finished steps."""
        self._knows_step = True
        return super().steps

    def _batches(self, steps: int | None = None) -> Iterator[Any]:
        epoch, self._open_epoch = self._epoch, None if steps is not None else self._epoch
        try:
            for batch in self._coming(steps, epoch):
                yield batch
                # The loop is through with the step, and with all that it does after one.
                self._leave_if_asked()
                self._snapshot()
        finally:
            self._open_epoch = None
        if steps is None:
            self._unfinished = None
            self._run.emit(EpochEvent(step=self._steps, number=epoch))

    def _coming(self, steps: int | None, epoch: int) -> Iterator[Any]:
        """Yield this rank's shares of so many batches, or of those that are left of an epoch."""
        if self._stream.num_samples is None:
            for batch in self._passes.batches(steps):
                yield self._share_of(batch)
            return
        step = self._steps
        last = None if steps is None else step + steps
        while (last is None and self._stream.epoch_of(step) == epoch) or (last is not None and step < last):
            with self._recorder.span("data_wait"):
                batch = self._handed_out(self._stream.read(step, self._shares.usual.start, self._shares.usual.stop))
            if self._ledger is not None:
                self._ledger.handed_out(batch, step)
            yield batch
            step += 1

    def _refuse_counting(self, steps: int | None) -> None:
        """Refuse a loop that would train too long, because it counts from its beginning what earlier starts of the
        script have done."""
        is_first, self._is_resumed = self._is_resumed, False
        if not is_first or self._knows_step or not self._steps or (steps is None and self._epoch == 0):
            return
        what = "passes through the data" if steps is None else "steps"
        raise RecipeError(
            f"the script was started again and goes on after step {self._steps}, and its loop counts {what} from the"
            " beginning, so it would train too long. Write `for epoch in state.epochs(N): for batch in epoch:`, or have"
            " the loop ask state.steps how far it is."
        )

    def step(self, batch: UserBatch) -> StepEvent:
        """Train on this rank's share of a global batch: forward, backward, reductions, clipping, the optimizer's step.
        `loss` and `count` of what it returns are of the whole global batch, on every rank; `len(batch)` is not.

        Raises:
            DataError: the share has another number of samples than the plan gives this rank.
            RecipeError: the ranks' optimizers have other settings or have done other numbers of steps; gradients are
                off, a parameter frozen at prepare is not any more, or gradients were changed (clipped) after a step.
        """
        self._begin_step()
        self._check_ready("step()")
        with self._calls.call(f"{self._name}.step()", facts=lambda: self._facts), self._guard.inside():
            microbatches = self._taken(batch)
            event = self._training.stepper(
                microbatches, step=self._steps, stop_requested=self._stop_flag, **self._agreement()
            )
            self._note_left()
        self._took(event)
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
        from weft.api.prepared.manual_step import ManualStep, check_manual  # loaded where a loop writes its own

        self._begin_step()
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
        self._took(step.event)

    def _end_manually(self, totals: LossTotals) -> StepEvent:
        self._facts = self._settings()
        called = self._calls.call(f"the end of {self._name}.manual_step()", facts=lambda: self._facts)
        with called, self._guard.inside():
            event = self._training.stepper.end(
                totals, step=self._steps, stop_requested=self._stop_flag, **self._agreement()
            )
            self._note_left()
        return event

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
        self._take_up()
        known = Metrics(metrics, outputs)
        collected = self._evaluation.outputs(outputs or logits_and_labels) if metrics else None
        recording = self._reporter.phase("evaluation")
        names = ", ".join(map(str, known.names))
        called = self._calls.call(f"{self._name}.evaluate({names})", meets=True)
        with called, self._guard.inside(), self._rounds.agreed("evaluate"), recording as seconds:
            totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
            for batch_totals in self._evaluation.run_through(loader, collected, counts=True):
                totals += batch_totals
                if self._recorder.progress is not None:
                    self._recorder.progress.moved()
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
        self._take_up()
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

    def epochs(self, number: int) -> Epochs:
        """Return the epochs up to `number`: `for epoch in state.epochs(3): for batch in epoch: state.step(batch)`.

        After `load` they begin with the epoch that the run was in.  `len(epoch)` is its number of steps, and
        `epoch.number` counts from 0.
        """
        self._take_up()
        self._is_resumed = False
        return Epochs(self._batches, lambda: self._epoch, self._stream.epoch_length, number, self._rounds.end)

    def _handed_out(self, batch: UserBatch) -> UserBatch:
        """A batch on its way to the loop; where others have other shares, the loop must draw nothing into it."""
        batch = trainable(batch)
        if self.plan.mesh.data > 1:
            self._yielded = YieldedBatch(fields_of(batch), self._mesh.device)
        return batch

    def _share_of(self, batch: UserBatch) -> UserBatch:
        """This rank's share of a batch that every rank has whole."""
        return self._shares.cut(batch, self._stream.digest, self._handed_out)

    def _taken(self, batch: UserBatch) -> list[Batch]:
        """The microbatches of a share that a step takes."""
        batch = trainable(batch)
        fields, shape = taken_apart(batch)
        if self._yielded is not None:
            self._yielded.check(fields)
        self._digest = self._shares.digest(fields)
        if self._ledger is not None:
            self._ledger.take(fields)
        self._share, self._loss.like = self._shares.find(fields), self._shares.with_spare(fields, shape)
        self._facts = self._settings()  # now: in the midst of a step a loss may switch what they speak of
        return self._shares.microbatches(fields, self._samples(batch))

    def _samples(self, batch: UserBatch) -> Tensor:
        """Numbers of this rank's samples of the coming step, which are those of a batch."""
        share = self._shares.find(fields_of(batch))
        return torch.arange(share.start, share.stop) + self._steps * self._batch_size

    @property
    def _epoch(self) -> int:
        """The epoch in which the next step lies, or behind whose last batch the loop has not come."""
        if self._unfinished is not None:
            return self._unfinished
        return self._passes.number if (known := self._stream.epoch_of(self._steps)) is None else known

    def _check_equal(self, digest: str) -> None:
        if (group := self._mesh["world"].group) is not None:
            with self._calls.call(f"{self._name}.batches()", meets=True):
                check_same_batches(digest, self._mesh.device, group)

    def _took(self, event: StepEvent) -> None:
        if self._ledger is not None:
            self._ledger.took(event)
        self._note(event, self._share.size)
        self._shares.took_step(self._share)
        self._is_stopping = event.stop

    def _begin_step(self) -> None:
        self._take_up()
        self._leave_if_asked()
        self._unfinished = None

    def _stop_flag(self) -> float:
        """Whether this rank was asked to stop, for the sum of a step."""
        return 0.0 if self._supervised is None else self._supervised.stop_flag

    def _leave_if_asked(self) -> None:
        """Save and end the script, where some rank was asked to stop in the last step.  All ranks come here at once."""
        if not self._is_stopping or self._supervised is None:
            return
        self._is_stopping = False
        number = self._supervised.agreed_signal(self._mesh)
        try:
            self.save()  # also where the loop has saved in this step: it may have done more behind that
        except SaveError as problem:
            if number != HAND_OVER:
                raise
            logger.warning("the ranks go on under their plan: %s", problem)
            return
        self._supervised.leave()

    def _note_left(self) -> None:
        """Gradients are as the step has left them."""
        self._named = self._named or list(self.model.named_parameters())
        self._left = LeftGradients(self._named)

    def _data_facts(self) -> dict[str, str]:
        return {
            "data: the batch of this step": self._digest,
            "the number of draws for this step": str(self._draws.drawn(self._steps)),
        }

    def _place(self) -> dict[str, Json]:
        is_through = self._open_epoch is not None and self._stream.epoch_of(self._steps) not in (None, self._open_epoch)
        return {
            **self._of_data(),
            **self._passes.state(),
            # The loop has taken all batches of an epoch, and not done yet what it does behind the last.
            **({"unfinished_epoch": self._open_epoch} if is_through else {}),
        }

    def _go_on(self, state: Mapping[str, Json]) -> None:
        refuse_other_data(state, **self._of_data())
        if self._ledger is not None:
            self._ledger.restart()
        self._passes.load(state)
        self._unfinished = cast("int | None", state.get("unfinished_epoch"))
        self._shares.forget()

    def _of_data(self) -> dict[str, Any]:
        return {
            "batch_size": self._batch_size,
            "num_samples": self._stream.num_samples,
            "seed": self._recipe.run.seed,
        }
