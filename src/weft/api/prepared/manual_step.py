"""A step whose forwards, losses and backwards the loop writes itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.api.batches.batch_shape import BatchShape
from weft.api.guards.gradients import WatchedGradients
from weft.api.guards.model_guard import Guard
from weft.api.ranks.calls import RankCalls
from weft.config.plan import Plan
from weft.errors import DataError, PlanError, RecipeError
from weft.events import StepEvent
from weft.model.blueprint import Batch
from weft.run.engine import Stepper
from weft.techniques.build import ParallelModel
from weft.techniques.core import LossTotals, take_microbatch, without_draws
from weft.techniques.core.own_forwards import OwnForwards

_INSTEAD = (
    "Draw by state.randn(batch, …), state.rand or state.randint before the block and put the numbers into the batch:"
    " these are keyed by sample, and parts() cuts them with it."
)


@dataclass(frozen=True, slots=True)
class StepTotal:
    """A number summed over the whole global batch, for `ManualStep.backward(…, of=…)`."""

    value: float

    def __float__(self) -> float:
        return self.value


@final
class ManualStep:
    """What `state.manual_step(batch)` gives its block.  Creating it begins the step, on every rank.

    `event` is the finished step's, after the block.
    """

    def __init__(
        self,
        model: ParallelModel,
        stepper: Stepper,
        microbatches: Sequence[Batch],
        *,
        step: int,
        seed: int,
        batch_size: int,
        like: BatchShape,
        calls: RankCalls,
        guard: Guard,
    ) -> None:
        self._model, self._stepper, self._microbatches = model, stepper, microbatches
        self._step, self._seed, self._batch_size, self._like = step, seed, batch_size, like
        self._calls, self._guard = calls, guard
        self._device = model.mesh.device
        part = model.parts[0]
        dtype = model.dtypes.compute if model.blueprint.casts_inputs else None
        self._forwards = OwnForwards(part, dtype, self._refuse)
        self._totals = LossTotals.empty(self._device)
        self._taken = 0
        self._event: StepEvent | None = None
        self._watched = WatchedGradients(
            model.module,
            "inside a manual step, as clip_grad_norm_ and zero_grad do",
            "Clip by session.prepare(…, max_grad_norm=1.0); scale the loss that step.backward is given, or leave a"
            " backward out, in place of its gradient.",
        )
        # Every rank makes the same backwards where these exchange something: weights, or statistics of a batch norm.
        self._exchanges = model.plan.data_parallel.shards_weights or bool(model.blueprint.batch_norm)
        self._scale = stepper.begin(step)

    @property
    def event(self) -> StepEvent:
        """The step as it went.  Raises `RecipeError` inside the block, where it has not ended."""
        if self._event is None:
            raise RecipeError("a manual step has its event after the block: read step.event behind `with`.")
        return self._event

    def parts(self) -> Iterator[Any]:
        """Yield this rank's share in the plan's microbatches, in the shape that the loader gives, on the device.

        The model is called in here, with a row for each sample of the part.  Go through all of them.
        """
        if self._taken:
            raise RecipeError(
                "step.parts() was gone through already, and a sample counts once in a step. Make all losses of a part"
                " in one loop."
            )
        for batch in self._microbatches:
            context = self._model.parts[0].context
            moved, state = take_microbatch(batch, context, self._device, self._seed, self._step)
            self._taken += 1
            with self._forwards.microbatch(state):
                yield self._like.restored(moved)

    def total(self, value: Tensor | float) -> StepTotal:
        """Return a number of this rank's share (a count of tokens), summed over the global batch.  Call on every rank.

        Raises:
            DataError: it is no number.
            PlanError: replicas step by themselves, each with the mean over its own samples.
        """
        if self._model.plan.data_parallel.replicas_step_alone:
            raise PlanError(
                "step.total() is a number of the whole global batch, and under local steps each replica takes the mean"
                " over its own samples. Give step.backward means over the part's samples."
            )
        own = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach().sum()
        mesh = self._model.mesh
        if mesh.index("tensor"):  # has the samples of the first tensor rank
            own = torch.zeros_like(own)
        with self._calls.call("step.total()", meets=True):
            world = mesh["world"]
            if world.group is not None:
                dist.all_reduce(own, group=world.group)
        if not math.isfinite(float(own)):
            raise DataError(f"the total is {float(own)} over the global batch. Give step.total() finite numbers.")
        return StepTotal(float(own))

    def backward(self, loss: Tensor, *, of: StepTotal | None = None, retain_graph: bool = False) -> None:
        """Add a loss's gradients to the step's; several losses are summed.

        Args:
            loss: a scalar: the mean over the part's samples; with `of` a sum, which is divided by it.
            of: what `total` returned: the loss of the step is the sum of all parts' `loss` over this.
            retain_graph: keep the graph for another backward of the same forward, as torch's own does.

        Raises:
            RecipeError: outside of a part, or the loss has no gradient.
            DataError: the loss is no scalar.
        """
        samples = self._forwards.samples
        if not samples:
            raise RecipeError("step.backward() belongs to a part: write it in `for part in step.parts():`.")
        fixed = "under torch.no_grad() or inside `with state.frozen():` from constants"
        check_loss(loss, call="step.backward()", of="the part's", fixed=fixed)
        if of is None:
            share = loss * samples
        elif type(of) is not StepTotal or not of.value > 0:
            raise DataError(f"step.backward(of={of!r}) wants what step.total(…) has returned, and more than 0.")
        else:
            share = loss * (self._batch_size / of.value)
        self._watched.check()
        self._totals.add(share.reshape(()), torch.zeros_like(self._totals.count))
        called = self._calls.call("step.backward()") if self._exchanges else nullcontext()
        with called, self._guard.inside():
            self._model.stores.on_backward(0, 0)  # ZeRO-3 reduces in every backward: nobody knows which is the last
            self._forwards.backward(share * self._scale, retain_graph)
        self._watched.note()

    # ── driven by `state.manual_step` ─────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def block(self, end: Callable[[LossTotals], StepEvent]) -> Generator[ManualStep]:
        """The step's block, and `end`, which updates.  A block left by an error changes nothing."""
        context = self._model.parts[0].context
        undrawn = without_draws(context, self._device, "the block of state.manual_step()", _INSTEAD)
        self._calls.blocks += 1
        try:
            # No ExitStack: an error that passes one stays alive, and the process groups with it, until garbage is
            # collected.
            with self._forwards.watched(), self._guard.manual(), undrawn:
                yield self
            self._check_taken()
        except BaseException:
            self._stepper.abandon()
            raise
        finally:
            self._calls.blocks -= 1
            context.current = None  # of a loop over parts that was left
        self._totals.count += sum(len(batch["sample_ids"]) for batch in self._microbatches)
        self._event = end(self._totals)

    def _check_taken(self) -> None:
        self._watched.check()
        if self._taken < len(self._microbatches):
            raise RecipeError(
                f"the block has taken {self._taken} of the {len(self._microbatches)} parts of this rank's share, so"
                " samples would be left out of the step. Go through all of step.parts()."
            )

    def _refuse(self) -> NoReturn:
        raise RecipeError(
            "backward() has reached the model inside a manual step by itself: its gradient would not be scaled, and"
            " with some plans lost. Write step.backward(loss) in place of loss.backward(); where the model is the"
            " fixed side of another's loss, call it inside `with state.frozen():`."
        )


def check_manual(
    plan: Plan, vocabulary_head: str | None, instead: str = "state.step(batch)", *, per_sample_loss: bool = True
) -> None:
    """Refuse plans under which a loop cannot call the model itself; `instead`: what they allow.

    Raises:
        PlanError: the model is cut into stages, its sequence or its logits are, ZeRO-3's ranks have unequal numbers
            of parts, or the loss sees the whole batch, of which a part of the step is not all.
    """
    mesh = plan.mesh
    if mesh.pipeline > 1:
        raise PlanError(
            f"the plan cuts the model into {plan.num_stages} stages, so that no rank can call it as a whole. Use"
            f" mesh.pipeline = 1, or {instead}."
        )
    if mesh.context > 1:
        raise PlanError(
            f"mesh.context = {mesh.context} gives each rank a part of every sequence, and a loss of the loop's own"
            f" would see that part alone. Use mesh.context = 1, or {instead}."
        )
    if mesh.tensor > 1 and vocabulary_head is not None:
        raise PlanError(
            f"under mesh.tensor = {mesh.tensor} each rank has a part of the logits of {vocabulary_head}, which prepare"
            " was told only a vocabulary loss reads. Leave prepare's vocabulary_head= out."
        )
    if not per_sample_loss and (mesh.data > 1 or plan.microbatch.is_split):
        raise PlanError(
            "the loss that session.prepare was given is no sum over samples, and a manual step computes it of parts of"
            " the batch, which gives something else than one process. Use state.step(batch), whose loss is of the whole"
            " batch, or train on one process with the whole batch in one microbatch. If the block computes other"
            " losses, give prepare one that is a sum over samples."
        )
    shares = plan.microbatch.shares(mesh.data)
    if plan.data_parallel.shards_weights and len(set(shares)) > 1:
        raise PlanError(
            f"ZeRO-3 gathers weights in every forward, and ranks with {min(shares)} and {max(shares)} parts have other"
            " numbers of them. Use data_parallel.zero = 2, or equal shares in microbatch.per_step."
        )


def check_loss(loss: Any, *, call: str, of: str, fixed: str) -> None:
    """Refuse what has no backward: `call` was given it, its mean is that `of` some samples, and `fixed` is what a model
    has been called in that leaves no gradient.

    Raises:
        DataError: it is no scalar.
        RecipeError: it has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise DataError(f"{call} wants a scalar, and got {what}. Take its mean over {of} samples.")
    if not loss.requires_grad:
        raise RecipeError(
            f"this loss has no gradient: nothing of it comes from a model that trains (detached, or computed {fixed})."
            " Leave its backward out."
        )
