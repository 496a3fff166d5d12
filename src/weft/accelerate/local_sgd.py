"""Steps that processes take by themselves."""

from __future__ import annotations

from typing import Any, Self, final

from weft.accelerate._job import job_of
from weft.errors import RecipeError


@final
class LocalSGD:
    """Let processes step by themselves within, and average their weights after every so many steps. That is other
    mathematics than one process's. On one process nothing happens.

    That is other mathematics than one process's.  On one process nothing happens.
    """

    def __init__(self, accelerator: Any, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        steps, rest = divmod(local_sgd_steps, accelerator.gradient_state.num_steps)
        if rest and accelerator.gradient_state.num_steps > 1:
            raise RecipeError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}) counts batches, of which"
                f" {accelerator.gradient_state.num_steps} make up a step. Give a multiple of it."
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self._job, self._model, self._steps = job_of(), model, max(steps, 1)

    def __enter__(self) -> Self:
        if self.enabled:
            self._job.inside.settle(local_steps=self._steps)
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled and error[0] is None:
            self._job.session.state(self._model).end_round()

    def step(self) -> None:
        """Count a batch: the plan's own rounds average the weights."""
