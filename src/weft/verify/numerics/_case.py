"""Cases of the numerics check: precisions to compare in, and the files of each rank's trial."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weft.config.plan import Plan
from weft.config.recipe import Precision


@dataclass(frozen=True, slots=True)
class CheckCase:
    """A precision, compiled or not."""

    precision: Precision
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision} compiled" if self.compiled else self.precision

    def plan(self, plan: Plan) -> Plan:
        """Return the plan in this precision."""
        return replace(plan, compute=replace(plan.compute, precision=self.precision, compile=self.compiled))

    def trial_file(self, folder: Path, rank: int) -> Path:
        """Return where a rank leaves its trial."""
        return folder / f"{str(self).replace(' ', '-')}-rank{rank}.safetensors"


EXACT = CheckCase("fp64")
"""The case in which everything must be equal, and in which causes are looked for."""


def outputs_file(folder: Path) -> Path:
    """Return where rank 0 leaves what its modules return."""
    return folder / "outputs.safetensors"
