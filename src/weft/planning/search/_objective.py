"""The objective: what makes one plan better than another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weft.errors import PlanError, did_you_mean

OBJECTIVES = ("throughput", "time", "cost")
Quantity = Literal["throughput", "time", "cost"]
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The quantity to be best at. Plans are compared by a pessimistic step time: step · exp(z · spread)."""

    quantity: Quantity = "throughput"
    """`throughput`: tokens per second; `time`: until a number of tokens is trained on; `cost`: of a token."""
    tokens: float | None = None
    """Tokens to train on in all; `time` needs it."""
    price_per_device_hour: float | None = None
    """Price in any currency.  None: `cost` counts device-hours."""
    pessimism: float = 1.2816
    """z: 1.2816 takes the step time that is not exceeded with a probability of 90 %."""

    def __post_init__(self) -> None:
        if self.quantity not in OBJECTIVES:
            hint = did_you_mean(self.quantity, OBJECTIVES) or f" Known are {', '.join(OBJECTIVES)}."
            raise PlanError(f'objective = "{self.quantity}" is not an objective.{hint}')
        if self.quantity == "time" and self.tokens is None:
            raise PlanError('objective = "time" needs the tokens to train on. Give --tokens, such as --tokens 2T.')
        for name in ("tokens", "price_per_device_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise PlanError(f"{name} = {value:g} must be a finite number above 0.")

    def pessimistic_seconds(self, step_seconds: float, spread: float) -> float:
        """`spread` is the standard deviation of the logarithm of the step time."""
        return step_seconds * math.exp(self.pessimism * spread)

    def score(self, step_seconds: float, devices: int) -> float:
        """Return what is compared, for steps of one global batch: less is better."""
        return step_seconds * devices if self.quantity == "cost" else step_seconds

    def training_seconds(self, step_seconds: float, tokens_per_step: float) -> float | None:
        """Return the seconds until all tokens are trained on, in whole steps; None where their number was not given."""
        return None if self.tokens is None else math.ceil(self.tokens / tokens_per_step) * step_seconds

    def cost_per_million_tokens(self, step_seconds: float, devices: int, tokens_per_step: float) -> float:
        """Return the cost in the currency of the price; without one, in device-hours."""
        hours = step_seconds * devices / _HOUR_SECONDS
        return hours * (self.price_per_device_hour or 1.0) * 1e6 / tokens_per_step
