"""The factor on the loss that keeps fp16 gradients inside fp16's range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from weft.config.document import JsonObject


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Grows after a run of finite steps and falls when gradients are not finite (Micikevicius et al., 2018).

    Its only input is the flag that all ranks agreed on, so all ranks hold the same scale without saying so.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Finite steps in a row before the scale grows."""
    hysteresis: int = 1
    """Non-finite steps since the last growth before the scale falls; each one after that lowers it again."""
    minimum: float = 1.0
    maximum: float = 2.0**40
    finite_steps: int = 0
    """Finite steps in a row, up to now."""
    tolerance_left: int | None = None
    """Non-finite steps that are still left until the scale falls; None: `hysteresis`."""

    def update(self, finite: bool) -> None:
        """Take up the agreed outcome of a step."""
        # Powers of two only: scaling by them is exact, and so a resumed run or another plan has the same bits.
        left = self.hysteresis if self.tolerance_left is None else self.tolerance_left
        if finite:
            self.finite_steps += 1
            if self.finite_steps >= self.growth_interval:
                self.finite_steps = 0
                self.tolerance_left = None
                self.scale = min(self.scale * self.growth_factor, self.maximum)
            return
        self.finite_steps = 0
        self.tolerance_left = left - 1 if left > 1 else 1
        if left <= 1:
            self.scale = max(self.scale * self.backoff_factor, self.minimum)

    def state(self) -> dict[str, float | int | None]:
        """Return everything as JSON values."""
        return asdict(self)

    def check_state(self, state: JsonObject) -> None:
        """Refuse what `state` of no such run can have returned.

        Raises:
            CheckpointError: names file and entry.
        """
        state.only([field.name for field in fields(self)])
        for name in ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "minimum", "maximum"):
            if state.number(name) != getattr(self, name):
                raise state.fail(name, f"{getattr(self, name):g}, as in every run")
        scale = state.number("scale", least=self.minimum, most=self.maximum)
        if not math.log2(scale).is_integer():
            raise state.fail("scale", "a power of two, as what is only doubled and halved")
        state.count("finite_steps", most=self.growth_interval - 1)
        if state.values["tolerance_left"] is not None:
            state.count("tolerance_left", least=1, most=self.hysteresis)

    def load_state(self, state: Mapping[str, float | int | None]) -> None:
        """Take over what `state` returned, and `check_state` has looked at."""
        for name, value in state.items():
            setattr(self, name, value)
