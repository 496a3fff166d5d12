"""The saves of one training: what is in them, when snapshots are due, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from weft.config.document import Json
from weft.events import CheckpointEvent, Run
from weft.run.checkpoint import SaveError
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.engine._report import StepReporter
from weft.run.engine._setup import TrainingState
from weft.techniques.core import CheckpointShard

if TYPE_CHECKING:
    from weft.run.engine.replicas import ReplicaCheck


class TrainingSaves:
    """Saves a training's whole state.  Call every method on every rank alike."""

    def __init__(
        self,
        checkpointer: TieredCheckpointer,
        training: TrainingState,
        data_state: Callable[[int], Mapping[str, Json]],
        reporter: StepReporter,
        run: Run,
        *,
        num_steps: int,
        rank: int,
    ) -> None:
        """`data_state(step)` is what must be known to go on with the data after `step` steps; `num_steps` are all steps
        of the run."""
        self._checkpointer = checkpointer
        self._training = training
        self._data_state = data_state
        self._reporter = reporter
        self._run = run
        self._num_steps = num_steps
        self._rank = rank
        self._stalls: dict[int, float] = {}
        """Step → seconds that training waited, of saves that have not reached the disk yet."""
        self._step_began = time.perf_counter()
        self._replicas: ReplicaCheck | None = None
        self.saved_step: int | None = None
        """Finished steps of the newest save that lasts."""

    def begin(self, step: int) -> None:
        """The loop begins after `step` finished steps."""
        self._checkpointer.begin(step)
        if (wanted := self._checkpointer.wanted_step) is not None:
            self._stalls[wanted] = 0.0  # the generation before has waited for it
        self._step_began = time.perf_counter()

    def save(self, step: int, *, at_once: bool) -> None:
        """Save so that it lasts: by a copy beside training, or `at_once` on the disk, which ends or stops a run.

        Raises:
            SaveError: the state is unsound, or the last save of the run failed.
            ReplicaError, CollectiveError: the weights of replicas differ, so that nothing is saved.
        """
        path, problem, is_durable = self._checkpointer.folder, "", True
        with self._reporter.phase("checkpoint") as seconds:
            try:
                saved = self._checkpointer.save(step, *self._contents(step), at_once=at_once)
                path, is_durable = saved.path, saved.is_durable
                self.saved_step = step
            except SaveError as error:
                if not error.training_can_continue or step == self._num_steps:
                    raise
                problem = str(error)
            self._say_drained()
        if is_durable:
            self._run.emit(CheckpointEvent(step=step, path=str(path), seconds=seconds(), problem=problem))
        else:
            self._stalls[step] = seconds()

    def after_step(self, step: int) -> None:
        """A step is finished, and no save of it is due: take a snapshot where one is, and say which saves have reached
        the disk."""
        now = time.perf_counter()
        step_seconds, self._step_began = now - self._step_began, now
        if self._checkpointer.next_snapshot and step >= self._checkpointer.next_snapshot:
            self._snapshot(step, step_seconds)
            self._step_began = time.perf_counter()
        self._say_drained()

    def _snapshot(self, step: int, step_seconds: float) -> None:
        path, problem = None, ""
        with self._reporter.phase("checkpoint") as seconds:
            try:
                path = self._checkpointer.snapshot(step, *self._contents(step), step_seconds)
            except SaveError as error:
                if not error.training_can_continue:
                    raise
                problem = str(error)
        if path is not None or problem:
            where = str(path or self._checkpointer.folder)
            self._run.emit(CheckpointEvent(step=step, path=where, seconds=seconds(), problem=problem))
        if path is not None:
            self.saved_step = step

    def _contents(self, step: int) -> tuple[list[CheckpointShard], dict[str, Json]]:
        state: dict[str, Json] = {
            **self._training.state(),
            "data": dict(self._data_state(step)),
            "skipped_steps": self._training.stepper.num_skipped,
        }
        shards = self._training.checkpoint_shards()
        # Where replicas step by themselves, their weights differ on purpose.
        if self._training.stepper.num_replicas == 1:
            from weft.run.engine.replicas import ReplicaCheck  # loaded by the first save

            if self._replicas is None:
                self._replicas = ReplicaCheck(self._checkpointer.peers, self._training.model.mesh.device)
            self._replicas.check(step, shards)
        return shards, state

    def _say_drained(self) -> None:
        """Say on rank 0 which save has reached the disk, or why it has not."""
        if self._rank != 0 or not self._stalls or (drained := self._checkpointer.poll()) is None:
            return
        stall = self._stalls.pop(drained.step, None)
        if stall is not None:
            self._run.emit(
                CheckpointEvent(
                    step=drained.step,
                    path=drained.path,
                    seconds=stall,
                    copy_seconds=drained.seconds,
                    problem=drained.problem,
                )
            )
