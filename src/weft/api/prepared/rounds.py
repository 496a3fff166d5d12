"""Rounds of local steps in a loop of one's own: which weights are looked at within one, and where the last one ends."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

from weft.api.guards.guards import Guard
from weft.api.ranks.calls import Calls
from weft.run.engine import TrainingState


class Rounds:
    """The rounds of one prepared model.  Under plans whose replicas meet in every step nothing here does anything."""

    def __init__(self, training: TrainingState, calls: Calls, name: str, guard: Guard) -> None:
        self._training: TrainingState | None = training
        self._calls, self._name, self._guard = calls, name, guard
        self._length = training.model.plan.data_parallel.local_steps
        self._told: set[str] = set()

    @contextmanager
    def agreed(self, method: str) -> Generator[None]:
        """Let the model have the weights that replicas agreed on last, for `method` to look at, and its own again
        after it.  Enter and leave on every rank."""
        if self._training is None or not self._training.is_open:
            yield
            return
        self.warn(method)
        with self._training.evaluated():
            yield

    def warn(self, method: str) -> None:
        """Say once of a method that it sees what replicas agreed on last, if they have taken steps since."""
        if self._training is not None and self._training.is_open and method not in self._told:
            self._told.add(method)
            warnings.warn(
                f"{self._name}.{method}() is in the middle of a round of {self._length} local steps: it sees the"
                " weights that replicas agreed on last, without what they have learnt since. Call"
                f" {self._name}.end_round() before it to have them averaged now.",
                stacklevel=4,
            )

    def end(self) -> None:
        """Average the replicas, if they have taken steps since they last did.  Call on every rank."""
        if self._training is not None and self._training.is_open:
            with self._calls.call(f"the last average of {self._name}", meets=True), self._guard.inside():
                self._training.finish()

    def close(self) -> None:
        """`end`; no steps follow, and the training is let go."""
        self.end()
        self._training = None


class RoundsOfSession:
    """The rounds of all models of a session, in the order in which they were prepared: what ends them holds them, also
    where the loop has let go of a state, because garbage is collected at other times on other ranks."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._all: list[Rounds] = []

    def of(self, training: TrainingState, name: str, guard: Guard) -> Rounds:
        """Return those of a model, whose guard knows that Weft itself averages."""
        made = Rounds(training, self._calls, name, guard)
        if training.model.plan.data_parallel.replicas_step_alone:
            self._all.append(made)
        return made

    def close(self) -> None:
        """End every model's last round.  Call on every rank."""
        for rounds in self._all:
            rounds.close()
        self._all.clear()
