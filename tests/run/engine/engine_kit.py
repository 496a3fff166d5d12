"""Small trainings on ranks, for the tests of the engine: a recipe, a plan, what a rank saw, and its whole state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
    learning_rate,
)
from weft.model.blueprint import Batch, Blueprint
from weft.model.build import build_model
from weft.run.data import rank_range
from weft.run.engine import TrainingState, create_training
from weft.techniques.core import CheckpointShard
from weft.verify.numerics import TrialData

BATCH = 8
"""Samples per step."""

ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-6, max_grad_norm=0.5, warmup_steps=2)


def recipe_of(precision: str = "fp64", optimizer: OptimizerRecipe = ADAMW, *, steps: int = 20, **shape: Any) -> Recipe:
    """A tied decoder of 4 blocks on 8 samples of 10 tokens; `shape` changes its sizes."""
    sizes: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 24, "vocabulary_size": 32,
        "sequence_length": 10, "tie_embeddings": True, "dropout": 0.1,
    }  # fmt: skip
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=DecoderShape(**(sizes | shape))),
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=BATCH),
        optimizer=optimizer,
        run=RunRecipe(steps=steps, seed=11),
        permit=PermitRecipe(precision=(precision,)),  # type: ignore[arg-type]
    )


def plan_of(
    precision: str = "fp64",
    *,
    zero: int = 0,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    micro: int = 2,
    shares: tuple[int, ...] | None = None,
    sequence: bool = False,
    reduce_precision: str = "fp32",
    bucket_bytes: int = 4096,
    every: str = "auto",
) -> Plan:
    data = replicate * shard
    return Plan(
        mesh=MeshPlan(replicate=replicate, shard=shard, tensor=tensor, pipeline=pipeline),
        data_parallel=DataParallelPlan(
            zero=zero,  # type: ignore[arg-type]
            bucket_bytes=bucket_bytes,
            reduce_every=every,  # type: ignore[arg-type]
            first_bucket_bytes=1024,
            reduce_precision=reduce_precision,  # type: ignore[arg-type]
        ),
        tensor_parallel=TensorParallelPlan(sequence=sequence),
        pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=micro, per_step=shares if shares is not None else BATCH // micro // data),
        compute=ComputePlan(precision=precision),  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class Seen:
    """What one rank saw; checkpoint shards are copies."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    skipped: list[bool] = field(default_factory=list[bool])
    scales: list[float] = field(default_factory=list[float])
    sample_ids: list[list[int]] = field(default_factory=list[list[int]])
    """By step, of this rank's microbatches."""
    state: list[CheckpointShard] = field(default_factory=list[CheckpointShard])
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class Samples:
    """`TrialData` for a sample function of one's own: `sample(id)` returns fields with a leading dimension of 1."""

    def __init__(self, sample: Callable[[int], dict[str, Tensor]], plan: Plan, mesh: Mesh) -> None:
        self._sample = sample
        self._plan = plan
        self._range = rank_range(plan.microbatch, plan.mesh.data, mesh.data_index)

    def microbatches(self, step: int) -> list[Batch]:
        start, stop = self._range
        ids = [step * BATCH + index for index in range(start, stop)]
        samples = [{**self._sample(i), "sample_ids": torch.tensor([i])} for i in ids]
        size = self._plan.microbatch.size
        return [
            {name: torch.cat([sample[name] for sample in samples[at : at + size]]) for name in samples[0]}
            for at in range(0, len(samples), size)
        ]


def decoder_of(recipe: Recipe) -> Callable[[], Blueprint]:
    return lambda: build_model(recipe)


class Training:
    """One rank's training: `step()` goes on by one step and notes what was seen."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        build: Callable[[], Blueprint] | None = None,
        sample: Callable[[int], dict[str, Tensor]] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.recipe = recipe
        self.mesh = mesh if mesh is not None else Mesh(plan.mesh, torch.device("cpu"))
        blueprint = build() if build is not None else build_model(recipe)
        self.state: TrainingState = create_training(recipe, plan, blueprint, self.mesh, Recorder())
        self.data: Any = (
            Samples(sample, plan, self.mesh)
            if sample is not None
            else TrialData(blueprint, plan, data_index=self.mesh.data_index, seed=recipe.run.seed)
        )
        self.seen = Seen()

    def step(self, step: int, microbatches: Sequence[Batch] | None = None) -> None:
        batches = self.data.microbatches(step) if microbatches is None else microbatches
        result = self.state.stepper(batches, step=step, learning_rate=learning_rate(self.recipe, step))
        self.seen.losses.append(result.loss)
        self.seen.norms.append(result.gradient_norm)
        self.seen.skipped.append(result.skipped)
        self.seen.scales.append(result.loss_scale)
        self.seen.sample_ids.append([int(i) for batch in batches for i in batch["sample_ids"]])

    def finished(self) -> Seen:
        self.seen.state = snapshot(self.state)
        self.seen.bytes = {
            **self.state.model.stores.model_state_bytes(),
            "optimizer": self.state.optimizer.state_bytes(),
        }
        return self.seen


def snapshot(state: TrainingState) -> list[CheckpointShard]:
    """Copies of all checkpoint shards: masters, buffers, optimizer state, averages."""
    return [replace(stored, tensor=stored.tensor.detach().clone(), let_go=None) for stored in state.checkpoint_shards()]


def train(
    recipe: Recipe,
    plan: Plan,
    steps: int,
    build: Callable[[], Blueprint] | None = None,
    sample: Callable[[int], dict[str, Tensor]] | None = None,
) -> Seen:
    """Train `steps` steps on one rank."""
    training = Training(recipe, plan, build, sample)
    for step in range(steps):
        training.step(step)
    return training.finished()


def agreed(seen: Sequence[Seen]) -> Seen:
    """Rank 0's view, after checking that all ranks agree on what is the same everywhere."""
    for other in seen[1:]:
        for name in ("losses", "norms", "skipped", "scales"):
            ours, theirs = torch.tensor(getattr(seen[0], name)), torch.tensor(getattr(other, name))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return seen[0]
