"""Runs an uncut model whose loss has auxiliary terms: functions of means over the whole batch.

With S = Σ sums and N = Σ count over all microbatches and ranks, the gradient of weight · value(S / N) is
Σ_microbatches ⟨c, ∂ sums⟩ with c = weight / N · value′(S / N): linear in the microbatches, once S and N are known.
So they are found first: by the one forward that there is, or by one more of every microbatch, which keyed draws make
repeatable; ranks add them up by one small all-reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.config.plan import BATCH_AXES
from weft.errors import PlanError
from weft.model.auxiliary import AuxiliaryLoss, auxiliary_of
from weft.model.blueprint import Batch, Blueprint
from weft.techniques.core._context import MicrobatchState
from weft.techniques.core._part import ModelPart
from weft.techniques.core._runner import (
    LossTotals,
    Runner,
    SequentialRunner,
    StepObserver,
    microbatch_state,
    move_batch,
)
from weft.techniques.runtime import Build

_Forward = tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]
"""Loss sum, count, and sums and count of every term, of a microbatch."""


@final
class AuxiliaryRunner(SequentialRunner):
    """A `SequentialRunner` whose backward is that of the loss and its auxiliary terms.

    `mesh` is the one over whose data ranks gradients are summed: what they see together is the batch.
    """

    def __init__(
        self,
        part: ModelPart,
        blueprint: Blueprint,
        mesh: Mesh,
        terms: Mapping[str, AuxiliaryLoss],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(part, blueprint, mesh, dtype=dtype)
        self._terms = terms
        self._batch_ranks = mesh.group_over(BATCH_AXES)

    def forward_backward(
        self, microbatches: Sequence[Batch], *, step: int, seed: int, scale: float | Tensor, observer: StepObserver
    ) -> LossTotals:
        """See `Runner`."""
        # S and N must be known before the first backward.  With one microbatch its own forward gives them; with several
        # an extra forward of each does, without gradients, because keeping all graphs would keep all activations.
        moved = [move_batch(batch, self._device) for batch in microbatches]
        states = [microbatch_state(batch, seed, step) for batch in moved]
        if len(moved) == 1:
            ahead = [self._forward(moved[0], states[0])]
            count, statistics = self._add_up(ahead)
        else:
            ahead = []
            count, statistics = self._add_up(self._rehearsed(moved, states))
        slopes = {name: self._slope(term, *statistics[name]) for name, term in self._terms.items()}
        totals = LossTotals.empty(self._device)
        for index, (batch, state) in enumerate(zip(moved, states, strict=True)):
            loss_sum, own_count, sums = ahead.pop() if ahead else self._forward(batch, state)
            totals.add(loss_sum, own_count)
            # The engine divides gradients by the count, which the terms have nothing to do with.
            terms = [(slopes[name] * mine.to(slopes[name].dtype)).sum() for name, (mine, _) in sums.items()]
            objective = loss_sum + (torch.stack(terms).sum() * count).to(loss_sum.dtype)
            self._backward(objective * scale, state, len(moved) - 1 - index, observer)
        observer.on_last_backward(0)
        totals.auxiliary = {n: float(term.value(_mean(*statistics[n]))) for n, term in self._terms.items()}
        return totals

    def _forward(self, batch: Batch, state: MicrobatchState) -> _Forward:
        """Return loss and terms of one forward, so that the terms see the same outputs as the loss."""
        sums: dict[str, tuple[Tensor, Tensor]] = {}

        def both(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            sums.update({name: term.sums(outputs, batch) for name, term in self._terms.items()})
            return self._blueprint.loss(outputs, batch)

        with self.actions("forward"):
            loss_sum, count = self._loss(batch, state, both)
        return loss_sum, count, sums

    @torch.no_grad()
    def _rehearsed(self, moved: Sequence[Batch], states: Sequence[MicrobatchState]) -> list[_Forward]:
        """Return forwards of all microbatches without gradients; changed buffers are restored."""
        buffers = [(buffer, buffer.clone()) for buffer in self._part.module.buffers()]
        sums = [self._forward(batch, state) for batch, state in zip(moved, states, strict=True)]
        for buffer, before in buffers:
            buffer.copy_(before)
        return sums

    @torch.no_grad()
    def _add_up(self, forwards: Sequence[_Forward]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Return the loss's count, 0-d, and each term's sums and count over the whole batch.  Collective."""
        # One fp64 vector (1 + Σ (size + 1),) for all of them, so that ranks pay one small all-reduce.
        shapes = {name: sums.shape for name, (sums, _) in forwards[0][2].items()}
        rows = [
            torch.cat([t.detach().to(torch.float64).reshape(-1) for t in (count, *itertools.chain(*terms.values()))])
            for _, count, terms in forwards
        ]
        count, *flat = all_reduce(torch.stack(rows).sum(0), self._batch_ranks).split(
            [1, *(size for shape in shapes.values() for size in (shape.numel(), 1))]
        )
        pairs = zip(shapes.items(), flat[::2], flat[1::2], strict=True)
        return count[0], {name: (sums.view(shape), own[0]) for (name, shape), sums, own in pairs}

    def _slope(self, term: AuxiliaryLoss, sums: Tensor, count: Tensor) -> Tensor:
        """Return the derivative of a weighted term by its sums, (shape of the sums)."""
        mean = _mean(sums, count).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(term.value(mean) * term.weight, mean)
        return slope / count.clamp(min=torch.finfo(count.dtype).tiny)


def _mean(sums: Tensor, count: Tensor) -> Tensor:
    return sums / count.clamp(min=torch.finfo(count.dtype).tiny)


def auxiliary_runner(build: Build, parts: Sequence[ModelPart], mesh: Mesh, runner: Runner | None) -> Runner:
    """Return what runs a loss with auxiliary terms.  `mesh` is as for `AuxiliaryRunner`; `runner`, where there is one,
    is what a technique brings instead of one microbatch after another.

    Raises:
        PlanError: there is one: a pipeline, whose first backward begins before the last forward.
        RecipeError: the terms are none.
    """
    terms = auxiliary_of(build.blueprint.loss)
    if runner is not None:
        raise PlanError(
            f"The model cannot be cut into stages: {build.blueprint.why_not('pipeline')}. Use plan.mesh.pipeline = 1."
        )
    return AuxiliaryRunner(parts[0], build.blueprint, mesh, terms, dtype=build.dtypes.compute)
