"""The proof at the start of `weft train`: two steps of the recipe under its plan, beside plain PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from weft.analysis.blueprint import build_blueprint
from weft.comm.device import forget_peak_memory
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import MicrobatchPlan, Plan
from weft.config.recipe import Recipe, learning_rate
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.run.data import PreparedData, data_shape, open_data
from weft.run.engine import create_training
from weft.run.engine.proof import (
    PlainResult,
    PlainSteps,
    ProveMode,
    StepsOfRank,
    compare_ranks,
    difference_of,
    digest_of,
    failure_of,
    few_microbatches,
    is_of_plan,
    keep,
    line_of,
    objective_of,
    optimizer_of,
    planned_steps,
    read_kept,
    set_rates,
    text_of_rank_0,
    whole_module,
)
from weft.techniques.core import sparse_tables
from weft.techniques.registry import exact

_LEAST_SECONDS = 10.0
_SHARE = 0.05
"""Share of the run that a proof may take, where that is more than 10 s."""


@dataclass(slots=True, kw_only=True)
class RecipeProof:
    """The proof of a recipe under a plan: a training of a few samples per rank, which is dropped afterwards.

    Rank 0 computes what plain PyTorch does from the same initial weights; it holds the whole model meanwhile.
    """

    recipe: Recipe
    plan: Plan
    mesh: Mesh
    prepared: PreparedData
    prove: ProveMode
    folder: Path
    """Folder of the run."""

    def run(self) -> str:
        """Return the line to be said.  Call on every rank.

        Raises:
            PlanError: on every rank: a tensor differs; the first is named, with what is likely wrong.
        """
        started = time.perf_counter()
        outcome, digest, line = self._by_rank_0() if self.mesh.rank == 0 else (None, "", "")
        if line := text_of_rank_0(line, self.mesh):
            return line
        mine = self._planned()
        verdict = compare_ranks(outcome, mine, self.mesh, self.plan.compute.precision)
        if verdict.deviations:
            modules = build_blueprint(self._part(), Plan()).module.named_modules()
            raise PlanError(
                difference_of(verdict, self.plan, {name: type(module).__name__ for name, module in modules})
            )
        del outcome, mine
        forget_peak_memory(self.mesh.device)  # what the run reports is its own
        kept = self.mesh.rank == 0 and keep(digest, verdict.num_tensors, verdict.largest)
        return line_of(verdict, time.perf_counter() - started, kept=kept)

    @property
    def _small(self) -> Plan:
        """The plan as it can be compared, with few samples."""
        plan, _ = exact(self.plan)
        return replace(plan, microbatch=few_microbatches(plan))

    def _part(self) -> Recipe:
        """The recipe with a batch of the few samples."""
        samples = self._small.global_batch_size
        return replace(self.recipe, batch=replace(self.recipe.batch, global_batch_size=samples))

    def _by_rank_0(self) -> tuple[PlainResult | None, str, str]:
        """Return plain PyTorch's result, the digest under which the proof is kept, and the line to print if there is no
        result."""
        blueprint = build_blueprint(self._part(), Plan())
        # In the order of what it costs: reasons are read off, a kept proof is a file, plain steps take seconds.
        if reason := self._unproven(blueprint):
            return None, "", f"proof     not proven: {reason}"
        facts = (self.recipe.digest, self.mesh.device.type)
        digest = digest_of(blueprint.module, blueprint.loss, None, self.plan, {}, *facts)
        kept = read_kept(digest) if self.prove == "auto" else None
        if kept is not None:
            return None, digest, kept.line
        result = self._plain(blueprint).run(self._budget)
        return (
            (result, digest, "") if isinstance(result, PlainResult) else (None, "", f"proof     not proven: {result}")
        )

    def _unproven(self, blueprint: Blueprint) -> str:
        """Why the plan cannot be compared with plain PyTorch; empty: it can."""
        if self.plan.compute.precision == "fp16":
            return "the first steps in fp16 may be skipped while the loss scale falls"
        if self.plan.compute.compile and self.prove == "auto":
            return 'compiling for a second batch size takes long (prove = "always" does it)'
        if sparse_tables(blueprint.module):
            return "torch neither clips nor steps the sparse gradients of its embeddings"
        return ""

    def _budget(self, step_seconds: float) -> float:
        """Seconds that the proof may take, from those of a plain step of its few samples."""
        if self.prove == "always":
            return math.inf
        # A share of the time that the run itself will take: nobody waits longer for a proof than for a short training.
        samples, ranks = self.recipe.batch.global_batch_size / self._small.global_batch_size, self.mesh["world"].size
        run_seconds = self.recipe.run.steps * step_seconds * samples / ranks
        return max(_LEAST_SECONDS, _SHARE * run_seconds)

    def _plain(self, blueprint: Blueprint) -> PlainSteps:
        dtype = torch.float64 if self.plan.compute.precision == "fp64" else torch.float32
        part, device = self._part(), self.mesh.device
        model = whole_module(blueprint, part.run.seed, device, dtype).train()
        trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = optimizer_of(part, trained)
        (batch,) = self._microbatches(part, blueprint, MicrobatchPlan(size=part.batch.global_batch_size), 1, 0)
        batch = {name: value.to(device) for name, value in batch.items()}
        inputs = {
            keyword: batch[name].to(dtype) if batch[name].is_floating_point() else batch[name]
            for keyword, name in blueprint.inputs.items()
            if name in batch
        }
        return PlainSteps(
            model=model,
            optimizer=optimizer,
            loss=blueprint.loss,
            objective=objective_of(model, inputs, blueprint.loss, batch),
            max_gradient_norm=part.optimizer.max_grad_norm,
            precision=self.plan.compute.precision,
            device=device,
            set_rates=lambda step: set_rates(part, optimizer, step),
        )

    def _planned(self) -> StepsOfRank:
        part, small, mesh = self._part(), self._small, self.mesh
        blueprint = build_blueprint(part, small)
        blueprint.sometimes = self.prepared.branches
        training = create_training(part, small, blueprint, mesh, Recorder(), self.folder)
        microbatches = self._microbatches(part, blueprint, small.microbatch, small.mesh.data, mesh.data_index)
        rate: Callable[[int], float] = lambda step: learning_rate(part, step)  # noqa: E731
        try:
            mine = planned_steps(training, microbatches, loss=blueprint.loss, optimizer=None, rate=rate)
        except Exception as error:
            if not is_of_plan(error):
                raise
            raise PlanError(failure_of(error, small)) from error
        training.close()
        return mine

    def _microbatches(
        self, part: Recipe, blueprint: Blueprint, microbatch: MicrobatchPlan, data_ranks: int, data_index: int
    ) -> list[Batch]:
        train = replace(self.prepared.train, global_batch_size=part.batch.global_batch_size)
        data = open_data(
            part,
            data_shape(blueprint, part),
            microbatch=microbatch,
            data_ranks=data_ranks,
            data_index=data_index,
            prepared=replace(self.prepared, train=train),
        )
        try:
            return list(data.microbatches(0))
        finally:
            data.close()
