"""Forward and backward of a step's microbatches: the contract of all runners, and the one for an uncut model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weft.comm.mesh import Mesh
from weft.model.blueprint import Batch, Blueprint, Loss
from weft.model.positions import call_model
from weft.techniques.core._context import MicrobatchState, StepContext
from weft.techniques.core._draw_net import without_draws
from weft.techniques.core._part import ModelPart
from weft.techniques.core.unequal_gathers import gathering_alike
from weft.techniques.core.views import no_view

if TYPE_CHECKING:
    from weft.techniques.core.local_tokens import LocalTokens


@dataclass(slots=True)
class LossTotals:
    """Loss sum and count over this data rank's microbatches: 0-d float64 tensors on the device.

    Only ranks of the last stage know them; on the others both are zero.  Tensor ranks know the same ones (of a grid,
    those that have the same samples), context ranks each those of its part of the sequence.
    """

    sum: Tensor
    count: Tensor
    auxiliary: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of the loss's auxiliary terms over the whole batch, unweighted; not in `sum`."""

    @classmethod
    def empty(cls, device: torch.device) -> LossTotals:
        loss_sum, count = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        return cls(loss_sum, count)

    def addend(self, mesh: Mesh) -> Tensor:
        """Return this rank's addend, (2,), to the world's sum and count; zeros if another rank adds the same ones."""
        both = torch.stack([self.sum, self.count])
        return both if mesh.loss_replicas.index == 0 else torch.zeros_like(both)

    def add(self, loss_sum: Tensor, count: Tensor) -> None:
        self.sum += loss_sum.detach()
        self.count += count.detach()


class StepObserver(Protocol):
    """The owner of the gradients (`ReducerSet`), as a runner calls it."""

    def on_microbatch(self, remaining: int) -> None:
        """Hear that a microbatch's backward comes next, with `remaining` more after it.  Only without a pipeline."""
        ...

    def on_backward(self, part: int, remaining: int) -> None:
        """Hear that a backward comes next which completes this part's gradients, with `remaining` more after it.

        Schedules that split the backward do not call it, except for the last one of `fully_shard` parts.
        """
        ...

    def on_last_forward(self, part: int) -> None:
        """Hear that the next backward of this part is its last in this step: gradients whose hooks fire are final.

        Schedules that split the backward do not call it (weight gradients come in passes of their own), except for
        `fully_shard` parts, whose last backward is a full one.
        """
        ...

    def on_last_backward(self, part: int) -> None:
        """Hear that every weight gradient of this part is complete.

        Parts are told in falling order on every rank, so that a parameter which several parts of a rank share is
        complete with the lowest of them.
        """
        ...


class Actions(Protocol):
    """Makes the context in which a microbatch's forward, backward or weight pass is timed: `Recorder.action`."""

    def __call__(self, name: str, microbatch: int | None = None, stage: int = -1) -> AbstractContextManager[object]: ...


def no_actions(name: str, microbatch: int | None = None, stage: int = -1) -> AbstractContextManager[object]:
    """Time nothing: see `Actions`."""
    return nullcontext()


class Runner(Protocol):
    """Runs the microbatches of this data rank.  Call on every rank alike; the numbers of microbatches of different data
    ranks may differ."""

    actions: Actions
    """Times what microbatches do; by default nothing does."""

    def forward_backward(
        self, microbatches: Sequence[Batch], *, step: int, seed: int, scale: float | Tensor, observer: StepObserver
    ) -> LossTotals:
        """Add the gradients of (sum of losses × `scale`) to the parameters, and return the unscaled totals."""
        ...

    def evaluate(self, microbatches: Sequence[Batch], *, step: int, seed: int) -> LossTotals:
        """Return the totals in evaluation mode, without gradients."""
        ...


def microbatch_state(batch: Batch, seed: int, step: int, tokens: LocalTokens | None = None) -> MicrobatchState:
    """Return the keys of randomness of a microbatch on the device; `tokens`: this rank's, where samples are shared."""
    field = batch.get("tokens")
    return MicrobatchState(
        seed=seed,
        step=step,
        sample_ids=batch["sample_ids"],
        sequence_length=None if field is None or field.ndim < 2 else field.shape[1],
        tokens=tokens,
    )


def take_microbatch(
    batch: Batch, context: StepContext, device: torch.device, seed: int, step: int
) -> tuple[Batch, MicrobatchState]:
    """Return this rank's fields of a microbatch, on the device, and its keys of randomness."""
    moved, tokens = move_batch(batch, device), None
    if context.sequence_shard is not None:
        moved, tokens = context.sequence_shard.cut_batch(moved)
    return moved, microbatch_state(moved, seed, step, tokens)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Move all fields to the device without waiting for the copies.

    No field is a view: a model may return its input, for a loss that differentiates by it, and `fully_shard` warns of
    a module that returns a view.
    """
    return {name: no_view(tensor.to(device, non_blocking=True)) for name, tensor in batch.items()}


def model_inputs(blueprint: Blueprint, batch: Batch, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the keywords of the model's forward, without fields that the batch lacks.

    With `blueprint.casts_inputs`, floating-point fields are cast to `dtype`.
    """
    keywords = blueprint.keywords(batch)
    if dtype is None or not blueprint.casts_inputs:
        return keywords

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return {keyword: tree_map(cast, value) for keyword, value in keywords.items()}


def compute_dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating-point parameter; None: there is none."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Generator[None]:
    """Enter evaluation mode without gradients, and restore the mode of every submodule afterwards."""
    training = [inner for module in modules for inner in module.modules() if inner.training]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for inner in training:
            inner.training = True


class SequentialRunner:
    """Runs an uncut model, one microbatch after another.

    `dtype` is what floating inputs are cast to: by default that of the part's parameters (give it for ZeRO-3, whose
    parameters are fp32 masters).
    """

    def __init__(self, part: ModelPart, blueprint: Blueprint, mesh: Mesh, *, dtype: torch.dtype | None = None) -> None:
        self.actions: Actions = no_actions
        self._part = part
        self._blueprint = blueprint
        self._device = mesh.device
        self._dtype = dtype if dtype is not None else compute_dtype_of(part.module)

    def forward_backward(
        self, microbatches: Sequence[Batch], *, step: int, seed: int, scale: float | Tensor, observer: StepObserver
    ) -> LossTotals:
        """See `Runner`."""
        totals = LossTotals.empty(self._device)
        with gathering_alike(self._part.context):
            for index, batch in enumerate(microbatches):
                moved, state = take_microbatch(batch, self._part.context, self._device, seed, step)
                with self.actions("forward", index):
                    loss_sum, count = self._loss(moved, state)
                totals.add(loss_sum, count)
                self._backward(loss_sum * scale, state, len(microbatches) - 1 - index, observer)
        observer.on_last_backward(0)
        return totals

    def _backward(self, objective: Tensor, state: MicrobatchState, remaining: int, observer: StepObserver) -> None:
        observer.on_microbatch(remaining)
        observer.on_backward(0, remaining)
        if remaining == 0:
            observer.on_last_forward(0)
        # A checkpoint in the user's own forward draws again under its keys.
        with self._part.context.entered(state), self.actions("backward"):
            objective.backward()

    def evaluate(self, microbatches: Sequence[Batch], *, step: int, seed: int) -> LossTotals:
        """See `Runner`."""
        totals = LossTotals.empty(self._device)
        with evaluating([self._part.module]):
            for batch in microbatches:
                totals.add(*self._loss(*take_microbatch(batch, self._part.context, self._device, seed, step)))
        return totals

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs in evaluation mode; `sample_ids` may be missing."""
        moved, state = take_microbatch(_with_sample_ids(batch), self._part.context, self._device, 0, 0)
        with evaluating([self._part.module]):
            return self._outputs(moved, state)

    def _loss(self, moved: Batch, state: MicrobatchState, loss: Loss | None = None) -> tuple[Tensor, Tensor]:
        what = f"the forward of {type(self._part.module).__name__} or its loss"
        with self._part.context.entered(state), without_draws(self._part.context, self._device, what):
            return (loss or self._blueprint.loss)(self._outputs(moved, state), moved)

    def _outputs(self, batch: Batch, state: MicrobatchState) -> Any:
        state.calls.restart()
        with self._part.context.entered(state):
            return call_model(self._part.module, model_inputs(self._blueprint, batch, self._dtype))


def _with_sample_ids(batch: Batch) -> Batch:
    if "sample_ids" in batch:
        return batch
    first = next(iter(batch.values()))
    return {**batch, "sample_ids": torch.arange(first.shape[0], device=first.device)}
