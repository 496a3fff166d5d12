"""A schedule that steps with the optimizer."""

from __future__ import annotations

from typing import Any, final

from weft.accelerate._job import GradientState


@final
class AcceleratedScheduler:
    """The user's scheduler, which steps once for each optimizer step, whatever the number of processes."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True) -> None:
        self.scheduler, self.step_with_optimizer = scheduler, step_with_optimizer
        self.optimizers: list[Any] = [*optimizers] if isinstance(optimizers, list | tuple) else [optimizers]
        self.gradient_state = GradientState()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the loop accumulates or the optimizer's step was left out."""
        state = self.gradient_state
        if self.step_with_optimizer and not state.sync_gradients:
            self.scheduler._step_count += int(state.adjust_scheduler)
        elif not (self.step_with_optimizer and any(optimizer.step_was_skipped for optimizer in self.optimizers)):
            self.scheduler.step(*args, **kwargs)
