"""What recorded runs of a machine say of its prices: factors and seconds by what a step consists of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.config.document import Rules
from weft.errors import DataError

_RULES = Rules(DataError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCorrection:
    """How long operators take beside their price, in one precision, on ranks with so many cores."""

    precision: str
    cores: float
    """Cores of a rank; below 1 where ranks share one."""
    products: float = 1.0
    """Factor on the seconds of matrix products and attention."""
    convolutions: float = 1.0
    """The same of convolutions."""
    plain: float = 1.0
    """Factor on the seconds of operators that only move data."""
    copies: float = 1.0
    """Factor on the seconds of ZeRO-3's copies between weights and what travels."""
    operator_seconds: float = 0.0
    """Seconds that every pass of an operator takes in addition."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.above_zero(self, "cores", "products", "convolutions", "plain", "copies")
        _RULES.at_least(self, 0, "operator_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Corrections of all parts of a step.  By default there are none: prices are as they were."""

    compute: tuple[ComputeCorrection, ...] = ()
    communication: float = 1.0
    """Factor on the seconds of a collective or message."""
    collective_seconds: float = 0.0
    """Seconds that each takes in addition."""
    optimizer: float = 1.0
    """Factor on the seconds of the optimizer's step."""
    optimizer_seconds: float = 0.0
    """Seconds that it takes in addition."""
    step_seconds: float | None = None
    """Time of a step outside of all that, in seconds; None: the calibration's."""
    spread: float | None = None
    """Standard deviation of log(measured / corrected) of runs that had no part in the fit; None: too few to tell."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.above_zero(self, "communication", "optimizer")
        _RULES.at_least(self, 0, "collective_seconds", "optimizer_seconds")

    def compute_of(self, precision: str, cores: float) -> ComputeCorrection | None:
        """Return the correction of a precision for ranks that have nearest to `cores` cores; None where no run in this
        precision was recorded."""
        known = [row for row in self.compute if row.precision == precision]
        return min(known, key=lambda row: abs(math.log2(row.cores / cores)), default=None)

    @property
    def least_factor(self) -> float:
        """The smallest factor on any part, at most 1: what a bound of the step must be lowered by."""
        factors = [factor for row in self.compute for factor in (row.products, row.convolutions, row.plain, row.copies)]
        return min([1.0, self.communication, self.optimizer, *factors])
