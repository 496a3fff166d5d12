"""Runs an uncut model whose loss sees the whole batch, on data ranks: each gathers the samples of all and computes the
whole loss, of which it counts for its share (`weft.techniques.data.find_whole_batch`)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.config.plan import BATCH_AXES
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint, Loss
from weft.techniques.core._context import MicrobatchState
from weft.techniques.core._draw_net import without_draws
from weft.techniques.core._part import ModelPart
from weft.techniques.core._runner import SequentialRunner
from weft.techniques.core.autograd import gather_samples
from weft.techniques.data.find_whole_batch import GatheredBatch, Gathering, WholeBatch, gathered, num_tensors
from weft.techniques.randomness._draw_trace import LOSS
from weft.techniques.runtime import Build


@final
class WholeBatchRunner(SequentialRunner):
    """A `SequentialRunner` whose forwards and loss see the samples of all data ranks of `mesh`, one microbatch each."""

    def __init__(
        self,
        part: ModelPart,
        blueprint: Blueprint,
        mesh: Mesh,
        whole: WholeBatch,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(part, blueprint, mesh, dtype=dtype)
        self._whole, self._ranks = whole, mesh.group_over(BATCH_AXES)

    def _loss(self, moved: Batch, state: MicrobatchState, loss: Loss | None = None) -> tuple[Tensor, Tensor]:
        model = type(self._part.module).__name__
        what = f"the forward of {model} or its loss"
        with self._part.context.entered(state), without_draws(self._part.context, self._device, what):
            with Gathering(self._whole.products, self._gather) as gathering:
                outputs = self._outputs(moved, state)
            is_as_seen = gathering.num_products == self._whole.num_products
            if not is_as_seen or num_tensors(outputs) != len(self._whole.outputs):
                raise PlanError(
                    f"The forward of {model} does something else than without values, so the samples of other ranks"
                    " cannot be put into it. Use plan.mesh.replicate = 1 and plan.mesh.shard = 1."
                )
            show = getattr(loss or self._blueprint.loss, "show", None)
            if show is not None and not show(outputs, moved):
                nothing = torch.zeros((), dtype=torch.float64, device=self._device)
                return nothing, nothing
            outputs = gathered(outputs, self._whole.outputs, self._gather)
            loss_sum, count = (loss or self._blueprint.loss)(outputs, GatheredBatch(moved, self._gather))
        return loss_sum / self._ranks.size, count / self._ranks.size

    def _gather(self, tensor: Tensor, dim: int) -> Tensor:
        return gather_samples(tensor, self._ranks, dim)


def whole_batch_runner(build: Build, part: ModelPart, whole: WholeBatch) -> WholeBatchRunner:
    """Return what runs a loss that is no sum over samples on several data ranks.

    Raises:
        PlanError: the loss draws, or has auxiliary terms, or nothing says what is to be gathered.
    """
    blueprint, reason = build.blueprint, whole.reason
    if LOSS in build.draws.modules:
        reason = "it draws random numbers, which are keyed by sample"
    if getattr(blueprint.loss, "auxiliary", None):
        reason = "it has auxiliary terms, which are sums over samples"
    if reason:
        raise PlanError(
            f"The loss sees the whole batch, and data ranks cannot share it: {reason}. Use plan.mesh.replicate = 1 and"
            " plan.mesh.shard = 1."
        )
    return WholeBatchRunner(part, blueprint, build.mesh, whole, dtype=build.dtypes.compute)
