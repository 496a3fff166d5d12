"""One stage at work: forward and backward of single microbatches, and what must be kept between them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint, logits_of
from weft.model.positions import call_model
from weft.techniques.core import LossTotals, MicrobatchState, ModelPart, model_inputs, without_draws
from weft.techniques.pipeline.border import border_of
from weft.techniques.pipeline.cut import Received
from weft.techniques.pipeline.weight_pass import WeightPass, deferring


@dataclass(slots=True)
class _InFlight:
    """A microbatch between its forward and its last backward pass."""

    state: MicrobatchState
    """Its keys of randomness: a checkpoint in the user's own forward draws again in the backward."""
    received: Tensor | None
    """The activation from the previous stage, a leaf that collects its gradient; None on the first stage."""
    root: GradientEdge | None
    """The edge of the graph at which backward starts (loss or output), without the data.

    It is an edge also because `backward` from a tensor would leave the mode of `deferring`, which recomputing blocks
    need."""
    start: Tensor | None
    """The gradient to start with: a one for the loss; None where it comes from the next stage."""
    queue: WeightPass | None
    """Weight gradients still to compute; None: the backward is a full one."""


class Stage:
    """Runs one part.  `dtype` is what floating inputs are cast to."""

    def __init__(self, part: ModelPart, blueprint: Blueprint, dtype: torch.dtype | None) -> None:
        self.part = part
        self._blueprint = blueprint
        self._dtype = dtype
        self._in_flight: dict[int, _InFlight] = {}
        self._entry = next((inner for inner in part.module.modules() if isinstance(inner, Received)), None)
        self._border = border_of(part.module)
        assert self._border or (self._entry is None) == part.is_first, "the stage was not cut as its part says"

    def forward(
        self,
        microbatch: int,
        batch: Batch,
        state: MicrobatchState,
        received: Tensor | None,
        *,
        split: bool,
        scale: float | Tensor,
        totals: LossTotals,
    ) -> Tensor | None:
        """Return the detached activation for the next stage; the last stage adds its loss to `totals` instead.

        `split` puts the weight gradients off to `backward_weights`.  Without gradients nothing is kept.
        """
        training = torch.is_grad_enabled()
        queue = WeightPass() if split and training else None
        if received is not None and training:
            received.requires_grad_()
        what = f"the forward of {type(self.part.module).__name__} or its loss"
        undrawn = without_draws(self.part.context, state.sample_ids.device, what)
        with self.part.context.entered(state), self._given(received), _deferring(queue), undrawn:
            outputs = call_model(self.part.module, model_inputs(self._blueprint, batch, self._dtype))
            if self.part.is_last:
                loss_sum, count = self._loss(outputs, batch)
                totals.add(loss_sum, count)
                output = loss_sum * scale if training else loss_sum
            else:
                output = self._activation(outputs)
        if training:
            # The output itself is not kept: the next stage has it, and this graph needs only its edge.
            root = get_gradient_edge(output) if output.requires_grad else None
            start = torch.ones_like(output) if self.part.is_last else None
            self._in_flight[microbatch] = _InFlight(state, received, root, start, queue)
        return None if self.part.is_last else output.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient for the previous stage (None on the first).

        Weight gradients are complete afterwards, or, if the forward was `split`, wait for `backward_weights`.
        """
        flight = self._in_flight[microbatch]
        if flight.root is not None:
            with self.part.context.entered(flight.state), _deferring(flight.queue):
                torch.autograd.backward([flight.root], [gradient if flight.start is None else flight.start])
        received, flight.received, flight.root = flight.received, None, None
        if flight.queue is None:
            del self._in_flight[microbatch]
        if received is None:
            return None
        return received.grad if received.grad is not None else torch.zeros_like(received)

    def backward_weights(self, microbatch: int) -> None:
        """Compute the weight gradients that the backward of this microbatch put off (none: nothing to do)."""
        flight = self._in_flight.pop(microbatch, None)
        if flight is not None and flight.queue is not None:
            flight.queue.run()

    def finish_weights(self) -> None:
        """Compute all weight gradients that are put off and whose backward has been."""
        for microbatch, flight in list(self._in_flight.items()):
            if flight.root is None and flight.queue is not None:
                self.backward_weights(microbatch)

    @contextmanager
    def _given(self, received: Tensor | None) -> Generator[None]:
        if self._border is not None:
            self._border.begin(received)
        if self._entry is not None:
            self._entry.value = received
        try:
            yield
        finally:
            if self._border is not None:
                self._border.begin(None)
            if self._entry is not None:
                self._entry.value = None

    def _loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        try:
            return self._blueprint.loss(outputs, batch)
        except RuntimeError as error:
            if "differentiated Tensor" not in str(error):
                raise
            raise PlanError(
                "the loss takes a gradient by a tensor that its outputs do not depend on within the last stage. Of the"
                " graph each stage has a part: use plan.mesh.pipeline = 1."
            ) from error

    def _activation(self, outputs: Any) -> Tensor:
        activation = logits_of(outputs)
        activation = getattr(activation, "last_hidden_state", activation)
        if isinstance(activation, Tensor) and activation.is_floating_point():
            return activation
        raise PlanError(
            f"Stage {self.part.stage} of {type(self.part.module).__name__} gives {type(outputs).__name__} where one "
            f"floating-point tensor must go to the next stage: what follows the blocks has to stand in the cut table's "
            f"tail. Correct the table, or set plan.mesh.pipeline = 1."
        )


def _deferring(queue: WeightPass | None) -> ExitStack:
    stack = ExitStack()
    if queue is not None:
        stack.enter_context(deferring(queue))
    return stack
