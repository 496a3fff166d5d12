"""Whether ranks start again after a failure: the policies of a recipe, and the end of endless restarts."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.recipe import OnFailure
from weft.run.supervise._failure import GenerationFailure

_LONGEST_PAUSE_SECONDS = 30.0
_FAILURES_IN_A_ROW = 3
"""Failures of one rank in a row after which its device counts as broken, though steps were saved between them."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The ranks start again."""

    num_restarts: int
    """Restarts since a new step was last saved, this one included."""
    pause_seconds: float
    """Time to wait before: none for the first, so that one fault costs little; then longer, for what may pass."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """The ranks start again on fewer devices."""

    without_rank: int
    """Rank whose device is left out."""
    reason: str
    """Why: the end of a sentence that names both plans."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The run ends with its error."""

    reason: str
    """Why, as a sentence for the end of the report; empty where the error says everything."""


@dataclass(frozen=True, slots=True)
class PolicyTexts:
    """How messages name the policies, by where the user gave them."""

    stop: str = 'run.on_failure.{kind} = "stop" in the recipe; "restart" would start the ranks again.'
    max_restarts: str = "run.on_failure.max_restarts = {number}"


class RestartPolicy:
    """Decides after each failure of one run."""

    def __init__(
        self,
        policies: OnFailure,
        saved_step: int,
        samples_per_step: int,
        texts: PolicyTexts | None = None,
        *,
        tries_early_errors: bool = False,
    ) -> None:
        """`saved_step`: finished steps of the newest saved state when the run starts; 0 for none.  With
        `tries_early_errors` an error before the first step is tried once more, too."""
        self._tries_early_errors = tries_early_errors
        self._policies = policies
        self._texts = texts or PolicyTexts()
        self._saved_step = saved_step
        self._samples_per_step = samples_per_step
        self._num_restarts = 0
        self._last: GenerationFailure | None = None
        self._failed_rank = -1
        self._in_a_row = 0
        """Failures of this rank in a row, whatever was saved between them."""
        self._before_shrink: GenerationFailure | None = None

    def decide(self, failure: GenerationFailure, saved_step: int) -> Restart | Shrink | Stop:
        """Decide what follows a failure.  `saved_step`: finished steps of the newest saved state now."""
        if saved_step > self._saved_step:
            self._num_restarts, self._last = 0, None
        self._saved_step = max(saved_step, self._saved_step)
        last, self._last = self._last, failure
        self._in_a_row = self._in_a_row + 1 if failure.rank == self._failed_rank else 1
        self._failed_rank = failure.rank
        if failure.kind == "input":
            return Stop("")
        policy = getattr(self._policies, failure.kind)
        if policy == "stop":
            return Stop(self._texts.stop.format(kind=failure.kind))
        if failure.kind == "error" and not failure.made_steps and last is None and not self._tries_early_errors:
            return Stop("")  # raised where every start comes by: a restart would repeat it
        if policy == "shrink" and (shrink := self._shrink(failure, last)) is not None:
            return shrink
        if failure.kind == "error" and failure.is_again(last):
            at = f"at step {failure.step} " if failure.step else ""
            return Stop(f"The same error came {at}after a restart, too. {self._batch(failure.step)}".rstrip())
        if failure.kind == "error" and failure.is_again(self._before_shrink):
            return Stop(f"The same error came at step {failure.step} on fewer devices. {self._batch(failure.step)}")
        if self._num_restarts >= self._policies.max_restarts:
            return Stop(self._crash_loop(failure))
        self._num_restarts += 1
        pause = 0.0 if self._num_restarts == 1 else min(2.0 ** (self._num_restarts - 2), _LONGEST_PAUSE_SECONDS)
        return Restart(self._num_restarts, pause)

    def shrunk(self) -> None:
        """The ranks start on fewer devices: what failed before was another rank's."""
        self._before_shrink, self._last = self._last, None
        self._num_restarts = self._in_a_row = 0
        self._failed_rank = -1

    def _shrink(self, failure: GenerationFailure, last: GenerationFailure | None) -> Shrink | None:
        """Whether a rank fails in such a way that the others shall go on alone."""
        if failure.kind == "host_memory":
            return Shrink(failure.rank, "since the host had no memory left")
        is_repeated = self._in_a_row > 1 and last is not None
        if not (is_repeated or self._in_a_row >= _FAILURES_IN_A_ROW) or failure.is_again(self._before_shrink):
            return None
        times = "twice" if self._in_a_row == 2 else f"{self._in_a_row} times"
        return Shrink(failure.rank, f"since rank {failure.rank} failed {times} in a row")

    def _crash_loop(self, failure: GenerationFailure) -> str:
        limit = self._texts.max_restarts.format(number=self._policies.max_restarts)
        if not self._policies.max_restarts:
            return f"{limit} allows no restart."
        times = "Restarting once" if self._num_restarts == 1 else f"Restarting {self._num_restarts} times in a row"
        saved = f"after step {self._saved_step}" if self._saved_step else "at all"
        return f"{times} has saved no new step {saved} ({limit}). {self._batch(failure.step)}".rstrip()

    def _batch(self, step: int) -> str:
        """Name the batch of a step, which may be what it fails by."""
        if step < 1:
            return ""
        first = (step - 1) * self._samples_per_step
        return f"The batch of step {step} is samples {first:,} to {first + self._samples_per_step - 1:,} of the order."
