"""The proof at the start of a session: this model, loss, optimizer and batch under the plan, beside plain PyTorch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.api.batches.batch_shape import BatchShape, taken_apart
from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import BatchStream, UserBatch, fields_of
from weft.api.guards.model_guard import Guard
from weft.comm.device import forget_peak_memory
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import MicrobatchPlan, Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError, RecipeError
from weft.model.blueprint import Blueprint
from weft.run.engine import TrainingState
from weft.run.engine.proof import (
    KeptProof,
    PlainResult,
    PlainSteps,
    ProveMode,
    Snapshot,
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
    planned_steps,
    read_kept,
    text_of_rank_0,
)
from weft.techniques.registry import exact

BUDGET_SECONDS = 10.0
"""Seconds that a proof may take where nobody asked for it by name."""


def check_prove(prove: Any) -> ProveMode:
    """Return the setting.  Raises `RecipeError` for another word."""
    if prove not in ("auto", "always", "never"):
        raise RecipeError(
            f'prove = {prove!r} is not a way to prove. Write "auto" (where it takes no longer than'
            f' {BUDGET_SECONDS:.0f} s, and once for the same code and plan), "always" or "never".'
        )
    return prove


@contextmanager
def variables_kept(model: nn.Module, loss: object, optimizer: object) -> Generator[Callable[[], None]]:
    """Put variables of files, of classes and around the loss, which steps on trial may write, back at the end; what is
    yielded does so at once."""
    around = Snapshot(("model", model), ("loss", loss), ("optimizer", optimizer), enters_modules=False)
    try:
        yield around.put_back
    finally:
        around.put_back()


class SessionProof:
    """The proof of one model.  Made before the model is touched; `check` follows when the plan is in place.

    Rank 0 computes what plain PyTorch does, on the very objects that the user gave, and puts them back.
    """

    @classmethod
    def of(
        cls,
        prove: ProveMode,
        quiet: bool,
        recipe: Recipe,
        plan: Plan,
        blueprint: Blueprint,
        mesh: Mesh,
        put_back: Callable[[], None],
        **given: Any,
    ) -> Self | None:
        """Begin a proof, on every rank; None where none is wanted.  `put_back`: of `variables_kept`."""
        if prove == "never":
            return None
        put_back()
        limit = recipe.optimizer.max_grad_norm
        made = cls(prove, plan, blueprint, mesh, **given, max_gradient_norm=limit, quiet=quiet)
        made._put_back = put_back
        return made

    def __init__(
        self,
        prove: ProveMode,
        plan: Plan,
        blueprint: Blueprint,
        mesh: Mesh,
        *,
        optimizer: torch.optim.Optimizer,
        loss: Any,
        stream: BatchStream,
        example: UserBatch,
        max_gradient_norm: float | None,
        quiet: bool,
    ) -> None:
        self._prove, self._plan, self._mesh, self._quiet = prove, plan, mesh, quiet
        self._blueprint, self._model = blueprint, blueprint.module
        self._optimizer, self._loss = optimizer, loss
        self._put_back: Callable[[], None] = lambda: None
        self._owners = {name: type(module).__name__ for name, module in self._model.named_modules()}
        self._max_gradient_norm = max_gradient_norm
        self._stream = stream
        self._example = example
        self._microbatch = few_microbatches(plan)
        self._total = self._microbatch.size * sum(self._microbatch.shares(plan.mesh.data))
        self._outcome: PlainResult | None = None
        self._digest, self._status = "", ""
        self._started = time.perf_counter()
        self._seconds = 0.0
        if mesh.rank == 0:
            # Rank 0 alone computes: it has the user's own objects, as plain PyTorch would use them.
            self._begin()
            self._seconds = time.perf_counter() - self._started

    def _begin(self) -> None:
        """Compute by plain PyTorch; on rank 0."""
        reason = self._unproven()
        kept: KeptProof | None = None
        if not reason:
            facts = (self._blueprint.inputs, self._max_gradient_norm, self._mesh.device.type)
            batch = fields_of(self._example)
            self._digest = digest_of(self._model, self._loss, self._optimizer, self._plan, batch, *facts)
            kept = read_kept(self._digest) if self._prove == "auto" else None
        if not reason and kept is None:
            steps = self._plain().run(lambda step_seconds: BUDGET_SECONDS if self._prove == "auto" else math.inf)
            if isinstance(steps, PlainResult):
                self._outcome = steps
            else:
                reason = steps
        self._status = json.dumps({"reason": reason, "kept": None if kept is None else kept.line})

    def _unproven(self) -> str:
        """Why the plan cannot be compared with plain PyTorch; empty: it can."""
        plan = self._plan
        if exact(plan)[1]:
            return "the plan uses other mathematics than plain PyTorch's, by permission"
        if plan.compute.precision == "fp16":
            return "the first steps in fp16 may be skipped while the loss scale falls"
        if plan.compute.compile and self._prove == "auto":
            return 'compiling for a second batch size takes long (prove = "always" does it)'
        available = len(next(iter(fields_of(self._example).values())))
        if self._stream.num_samples is None and available < self._total:
            return f"the loader's first batch has {available} samples, and {self._total} are needed"
        return ""

    def _plain(self) -> PlainSteps:
        device = self._mesh.device
        rows, shape = self._rows(0, self._total)
        self._model.to(device)

        def objective() -> tuple[Tensor, float]:
            fields = {name: value.to(device, copy=True) for name, value in rows.items()}  # which a forward may write to
            inputs = {
                keyword: fields[name] if name in fields else shape.part(name, fields)
                for keyword, name in self._blueprint.inputs.items()
                if shape.has(name)
            }
            return objective_of(self._model, inputs, self._loss, shape.restored(fields))()

        return PlainSteps(
            model=self._model,
            optimizer=self._optimizer,
            loss=self._loss,
            objective=objective,
            max_gradient_norm=self._max_gradient_norm,
            precision=self._plan.compute.precision,
            device=device,
        )

    def _rows(self, start: int, stop: int) -> tuple[dict[str, Tensor], BatchShape]:
        """Samples of the first batch, as every rank reads them for itself, in the shape that the whole has: of four
        samples nobody could tell a list with an entry for each from one of tensors with four rows."""
        whole, shape = taken_apart(self._example)
        if self._stream.num_samples is not None:
            rows, own = taken_apart(self._stream.read(0, start, stop))
            if rows.keys() == whole.keys():
                return rows, own
            whole, shape = taken_apart(self._stream.read(0, 0, self._stream.batch_size))
        return {name: value[start:stop] for name, value in whole.items()}, shape

    def check(self, training: TrainingState, guard: Guard, recorder: Recorder, loss: LossOfUser) -> None:
        """Take the same steps under the plan, compare, and put everything back.  Call on every rank.

        Raises:
            PlanError: on every rank: a tensor differs; the first is named, with what is likely wrong.
        """
        started = time.perf_counter()
        # All ranks must take the same branch: rank 0 decides.
        known: Mapping[str, Any] = json.loads(text_of_rank_0(self._status, self._mesh))
        if known["kept"] or known["reason"]:
            self._say(known["kept"] or f"proof     not proven: {known['reason']}")
            return
        self._put_back()
        mine = self._planned(training, guard, loss)
        recorder.forget()
        verdict = compare_ranks(self._outcome, mine, self._mesh, self._plan.compute.precision)
        self._outcome = None
        del mine
        forget_peak_memory(self._mesh.device)
        if verdict.deviations:
            raise PlanError(difference_of(verdict, self._plan, self._owners))
        if self._mesh.rank == 0:
            seconds = self._seconds + time.perf_counter() - started
            kept = keep(self._digest, verdict.num_tensors, verdict.largest)
            self._say(line_of(verdict, seconds, kept=kept))

    def _planned(self, training: TrainingState, guard: Guard, loss: LossOfUser) -> StepsOfRank:
        """Return this rank's losses and gradients of the steps under the plan."""
        shares: MicrobatchPlan = self._microbatch
        counts, size = shares.shares(self._plan.mesh.data), shares.size
        index = self._mesh.data_index
        # Rows in the order of data ranks, so that all ranks together have the samples of the plain steps.
        start, stop = size * sum(counts[:index]), size * sum(counts[: index + 1])
        rows, shape = self._rows(start, stop)
        fields = {**rows, "sample_ids": torch.arange(start, stop)}
        cuts = range(0, stop - start, size)
        microbatches = [{name: value[at : at + size] for name, value in fields.items()} for at in cuts]
        try:
            with guard.inside(), loss.on_trial(shape):
                return planned_steps(
                    training,
                    microbatches,
                    loss=self._loss,
                    optimizer=self._optimizer,
                    rate=lambda step: float(self._optimizer.param_groups[0]["lr"]),
                    begins=guard.loss_parameters.begin,
                    ends=guard.loss_parameters.end,
                )
        except Exception as error:
            guard.restore()  # nobody else would: there is no state yet that could be closed
            if not is_of_plan(error):
                raise
            raise PlanError(failure_of(error, self._plan)) from error

    def _say(self, line: str) -> None:
        if self._mesh.rank == 0 and not self._quiet:
            print(line, flush=True)
