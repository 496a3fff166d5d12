"""What a run does when something fails: one policy for each kind of failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.document import Rules
from weft.errors import RecipeError

_RULES = Rules(RecipeError)

RestartOrStop = Literal["restart", "stop"]
"""`restart`: the ranks start again from the newest saved state.  `stop`: the run ends with the error."""
RestartShrinkOrStop = Literal["restart", "shrink", "stop"]
"""`shrink`: the ranks start again; where the same rank fails again, fewer go on under a plan for what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnFailure:
    """`[run.on_failure]`: what a run does when something fails.

    Wrong input (a setting, a path, a damaged dataset) always stops the run.  So does an error that comes back at the
    same step with the same words: a restart would only repeat it.

    `shrink` restarts first.  Where the same rank fails again before a new step is saved, or a third time in a row, the
    run goes on without its device: on as many ranks as there is a plan for, and on `run.min_devices` at least.
    """

    killed: RestartShrinkOrStop = "restart"
    """A signal killed a rank: a crash in native code, a person, the machine's operator."""
    error: RestartShrinkOrStop = "restart"
    """A rank raised an error that is not Weft's own, after steps had gone well."""
    hang: RestartShrinkOrStop = "restart"
    """A step does not end: a rank is stopped, waits for ever, or computes without end."""
    host_memory: RestartShrinkOrStop = "stop"
    """The host had no memory left.  A restart needs as much again, so by default the run stops; `shrink` takes fewer
    ranks at once."""
    device_memory: RestartOrStop = "stop"
    """A device had no memory left.  On fewer devices each would need more, so this knows no `shrink`."""
    not_finite: RestartOrStop = "stop"
    """More steps in a row than `max_skipped_steps` had a loss or gradient that was not finite."""
    replicas: RestartOrStop = "restart"
    """Ranks that hold the same weights hold different ones.  Every save compares them before it is written, so that the
    newest one is from before the fault."""
    straggler: Literal["warn", "ignore"] = "warn"
    """A rank's own work takes at least 1.5 times that of ranks with as much to do, step for step."""
    loss_spike: Literal["warn", "ignore"] = "warn"
    """Three losses in a row lie six deviations above those before."""
    max_restarts: int = 3
    """Restarts in a row between which no new step was saved; the next failure stops the run."""
    hang_seconds: float | None = None
    """Seconds without any progress of a step after which it hangs.  By default 5, or three times the longest of 99 in
    100 steps so far where that is more."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "max_restarts")
        _RULES.above_zero(self, "hang_seconds")
