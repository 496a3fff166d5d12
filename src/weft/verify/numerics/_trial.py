"""Run a few steps under a plan and keep what must not depend on the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS, DataParallelPlan, MicrobatchPlan, Plan
from weft.config.recipe import Precision, Recipe, learning_rate
from weft.events import StepEvent
from weft.model.blueprint import Batch, Blueprint
from weft.run.engine import TrainingState, create_training
from weft.run.worker._trial_data import TrialData
from weft.techniques.core import CheckpointShard, LossTotals, checkpoint_shards_of
from weft.techniques.registry import TECHNIQUES
from weft.verify.numerics._keep_fp64 import KeepFp64


@dataclass(slots=True, kw_only=True)
class Trial:
    """Results of a trial on one rank.  Its shards are copies, named `gradient/<parameter>` and as in a checkpoint."""

    initial: list[CheckpointShard]
    """Masters, frozen parameters and buffers before the first step."""
    gradients: list[CheckpointShard]
    """Gradients of the first step: of loss sum × scale, before clipping."""
    losses: list[float]
    """Global mean loss of every step."""
    gradient_norms: list[float]
    validation: float
    """Loss sum over the first batch in evaluation mode, after the steps; the same on all ranks of the last stage."""
    state: list[CheckpointShard]
    """Masters, frozen parameters and buffers after the last step."""
    launched: list[Counter[tuple[str, str, int]]]
    """(axis, operation, bytes) → launches: first those for the gradients of the first step, then those of each step."""
    rows: list[tuple[tuple[str, int, int], ...]]
    """Row counts among the launches that only the data decide (`ParallelModel.take_rows`)."""
    unused: list[bool]
    """Whether some parameter took no part on some rank, by step."""
    narrowed: Mapping[str, Precision]
    """Operators that rounded to less although the trial is in fp64, and to what."""


InnerCasts = Literal["wide", "as written"]
"""Treatment of casts inside a model in fp64: `wide` ignores those that would narrow, because rounding inside would
hide whether two plans agree."""


def one_process(plan: Plan) -> Plan:
    """The plan of one process for the same batch: no axis, no technique, everything in one microbatch."""
    alone = Plan(
        microbatch=MicrobatchPlan(size=plan.global_batch_size),
        data_parallel=DataParallelPlan().unsharded(),
        compute=replace(plan.compute, compile=False, backend="auto").waiting(COLLECTIVE_TIMEOUT_SECONDS),
    )
    for technique in TECHNIQUES:
        for ablation in technique.ablations:
            alone = ablation.apply(alone)
    return alone


def run_trial(
    recipe: Recipe,
    plan: Plan,
    build: Callable[[], Blueprint],
    *,
    steps: int,
    device: torch.device | None = None,
    label_range: int | None = None,
    mesh: Mesh | None = None,
    inspect: Callable[[TrainingState], None] | None = None,
    inside: InnerCasts = "wide",
) -> Trial:
    """Train `steps` steps on trial data and return what this rank saw.  Call on every rank of the plan's world.

    `mesh` is that of an earlier trial under the same axes, whose groups are used again.  `inspect` sees the model
    before the first forward.  `inside` is for plans in fp64 that compile nothing.
    """
    if mesh is None:
        mesh = Mesh(plan.mesh, device if device is not None else torch.device("cpu"))
    blueprint = build()
    recorder = Recorder()
    training = create_training(recipe, plan, blueprint, mesh, recorder)
    data = TrialData(blueprint, plan, data_index=mesh.data_index, seed=recipe.run.seed, label_range=label_range)
    if inspect is not None:
        inspect(training)
    initial = _model_state(training)
    # Made before casts are ignored: samples round as everybody's do.
    batches = [data.microbatches(step) for step in range(max(steps, 1))]
    kept = KeepFp64(watches_only=inside != "wide")
    results: list[StepEvent] = []
    with kept if plan.compute.precision == "fp64" and not plan.compute.compile else nullcontext():
        gradients = _first_gradients(training, recipe, batches[0])
        launched = [recorder.collectives.take_launched()]
        rows = [training.model.take_rows()]
        for step in range(steps):
            rate = learning_rate(recipe, step)
            results.append(training.stepper(batches[step], step=step, learning_rate=rate))
            launched.append(recorder.collectives.take_launched())
            rows.append(training.model.take_rows())
        totals = training.model.runner.evaluate(batches[0], step=0, seed=recipe.run.seed)
    state = _model_state(training)
    training.close()
    return Trial(
        initial=initial,
        gradients=gradients,
        losses=[result.loss for result in results],
        gradient_norms=[result.gradient_norm for result in results],
        validation=float(totals.sum),
        state=state,
        launched=launched,
        rows=rows,
        unused=[result.some_unused for result in results],
        narrowed=kept.narrowed,
    )


def _model_state(training: TrainingState) -> list[CheckpointShard]:
    return [_copy(shard) for shard in training.checkpoint_shards() if shard.name.startswith(("model/", "buffer/"))]


def _first_gradients(training: TrainingState, recipe: Recipe, microbatches: Sequence[Batch]) -> list[CheckpointShard]:
    """Gradients of the first step's loss, with buffers (running statistics) put back as they were."""
    buffers = [(buffer, buffer.clone()) for part in training.model.parts for buffer in part.module.buffers()]
    shards, _ = first_gradients(training, recipe, microbatches)
    for buffer, before in buffers:
        buffer.copy_(before)
    return shards


def first_gradients(
    training: TrainingState, recipe: Recipe, microbatches: Sequence[Batch]
) -> tuple[list[CheckpointShard], LossTotals]:
    """Return copies of this rank's gradients of the first step, of loss sum × scale before clipping, and the loss."""
    stores = training.model.stores
    stores.begin_step()
    totals = training.model.runner.forward_backward(
        microbatches, step=0, seed=recipe.run.seed, scale=1.0 / recipe.batch.global_batch_size, observer=stores
    )
    stores.finish()
    gradients = [shard.dense_gradient() for shard in stores.shards]
    return [_copy(shard) for shard in checkpoint_shards_of("gradient", stores.shards, gradients)], totals


def _copy(shard: CheckpointShard) -> CheckpointShard:
    return replace(shard, tensor=shard.tensor.detach().clone(), let_go=None)
