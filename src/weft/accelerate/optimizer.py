"""An optimizer that steps where gradients are synchronised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from weft.accelerate._job import GradientState, open_job


class _UserAttribute:
    """An attribute that is the user's optimizer's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type | None = None) -> Any:
        return self if of is None else getattr(of.optimizer, self._name)

    def __set__(self, of: Any, value: Any) -> None:
        setattr(of.optimizer, self._name, value)


@final
class AcceleratedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, whose `step` and `zero_grad` do nothing while a loop accumulates."""

    state: Any = _UserAttribute()
    param_groups: Any = _UserAttribute()
    defaults: Any = _UserAttribute()
    add_param_group: Any = _UserAttribute()
    state_dict: Any = _UserAttribute()
    load_state_dict: Any = _UserAttribute()

    def __init__(self, optimizer: torch.optim.Optimizer, before_step: Callable[[], None] | None = None) -> None:
        """`before_step` clips, where a configuration says to.  Optimizer's own constructor would make groups."""
        self.optimizer, self._before_step = optimizer, before_step
        self.gradient_state = GradientState()
        self.step_was_skipped = False
        """Whether the last step was left out for an overflow in fp16."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, unless the loop accumulates."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad() if set_to_none is None else self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step, unless the loop accumulates."""
        if self.gradient_state.sync_gradients:
            if self._before_step is not None:
                self._before_step()
            if (job := open_job()) is not None:
                job.skipped = False
            self.optimizer.step() if closure is None else self.optimizer.step(closure)
            self.step_was_skipped = job is not None and job.skipped

    def train(self) -> None:
        """Put an optimizer that averages weights into training: the weights are those that train."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Put an optimizer that averages weights into evaluation: the weights are the averages."""
        getattr(self.optimizer, "eval", lambda: None)()
