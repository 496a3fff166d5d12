"""Settings of local steps: how long a round is, and how replicas average at its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from weft.config.document import Rules
from weft.errors import PlanError
from weft.techniques.data.settings import ReplicaAveraging

_RULES = Rules(PlanError)
_AVERAGE_PASSES = 4.0
"""Times that masters are read or written around the average of replicas, besides anchor and momentum."""


@dataclass(frozen=True, kw_only=True)
class LocalStepsSettings(ReplicaAveraging):
    """The part of `data_parallel` that is about local steps."""

    local_steps: int = 0
    """Steps that each replica takes by itself before replicas average what they learnt (local SGD, DiLoCo), with the
    recipe's permission only; 0: replicas sum their gradients in every step."""
    outer_learning_rate: float = 0.7
    """How far local steps' weights go towards the replicas' average; 1: all the way."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the averages of local steps; 0: none, which is local SGD."""
    # The defaults are those of DiLoCo (Douillard et al., arXiv 2311.08105, §3).

    def check_settings(self) -> None:
        _RULES.at_least(self, 0, "local_steps")
        _RULES.above_zero(self, "outer_learning_rate")
        _RULES.between(self, 0, 1, "outer_momentum")
        for name in ("outer_learning_rate", "outer_momentum"):
            if not self.local_steps and getattr(self, name) != getattr(_DEFAULTS, name):
                raise _RULES.refuse(self, name, "has no effect with local_steps = 0. Remove it, or give local_steps.")

    def summed_every_step(self) -> Self:
        """Return the same with replicas that sum their gradients in every step."""
        names = ("local_steps", "outer_learning_rate", "outer_momentum")
        return replace(self, **{name: getattr(_DEFAULTS, name) for name in names})

    @property
    def round_length(self) -> int:
        return self.local_steps

    @property
    def outer_copies(self) -> int:
        """Copies of its masters that a rank keeps: the anchor, and the outer momentum if there is any."""
        if not self.local_steps:
            return 0
        return 2 if self.outer_momentum else 1

    def average_seconds(self, master_bytes: int, seconds_per_byte: float, memory_bytes_per_second: float) -> float:
        passes = (_AVERAGE_PASSES + 2.0 * self.outer_copies) * master_bytes
        return (seconds_per_byte * master_bytes + passes / memory_bytes_per_second) / self.local_steps


_DEFAULTS = LocalStepsSettings()
