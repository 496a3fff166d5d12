"""Backwards, and when they become a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.accelerate._preparing import Preparing
from weft.accelerate.utils.dataclasses import AutocastKwargs, ProfileKwargs
from weft.errors import RecipeError


class Accumulating(Preparing):
    """`backward`, accumulation and clipping."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches to an optimizer step."""
        return self._job.gradients.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self._job.gradients.num_steps = gradient_accumulation_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer steps behind this batch."""
        return self._job.gradients.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._job.gradients.sync_gradients = sync_gradients

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add a loss's gradients, divided by the batches to a step.

        A loss is a mean over this process's samples; those of all processes are averaged by their numbers.
        """
        retain = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise RecipeError(f"accelerator.backward({next(iter(kwargs))}=…) is not had. Leave it out.")
        steps = self.gradient_accumulation_steps
        loss = loss / steps if steps != 1 else loss
        if self._job.is_single and not self._optimizers:  # nothing is the job's, and there is nobody to ask
            loss.backward(retain_graph=retain)
        else:
            last = None if self.sync_gradients else False  # of a step that syncs there may be more
            self._job.session.backward(loss, retain_graph=retain, is_last=last)

    @contextmanager
    def accumulate(self, *models: Any) -> Generator[None]:
        """A batch of several that make up an optimizer step; the last of a loader ends one."""
        gradients = self._job.gradients
        if gradients.sync_with_dataloader and gradients.end_of_dataloader:
            self.step, gradients.sync_gradients = 0, True
        else:
            self.step += 1
            gradients.sync_gradients = self.step % gradients.num_steps == 0
        yield

    @contextmanager
    def no_sync(self, model: Any) -> Generator[None]:
        """Gradients are reduced at the step anyway."""
        yield

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[None]:
        """Gradients are reduced at the step anyway."""
        return nullcontext()

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """An uneven last batch is exact anyway."""
        return nullcontext()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Gradients are as they are meant wherever a loop sees them."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the whole gradient of a model to a norm, and return what it was."""
        if float(norm_type) != 2.0:
            raise RecipeError(f"clip_grad_norm_(norm_type={norm_type}): gradients are clipped by norm 2. Leave it out.")
        self._refuse_early("clip_grad_norm_")
        if self._asked.clips:  # the configuration's own word counts, as in DeepSpeed
            max_norm, self._has_clipped = self._asked.clips, True
        return self._job.session.clip_grad_norm_(_listed(parameters), max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of a model's gradient."""
        self._refuse_early("clip_grad_value_")
        self._job.session.clip_grad_value_(_listed(parameters), clip_value)

    def _refuse_early(self, call: str) -> None:
        if not self.sync_gradients:
            raise RecipeError(
                f"accelerator.{call}() was called while gradients accumulate, and what is added later would not be"
                f" clipped with them. Write: if accelerator.sync_gradients: accelerator.{call}(…)"
            )

    _has_clipped = False

    def _before_step(self, optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
        limit = self._asked.clips

        def clip() -> None:
            if not self._has_clipped:
                session = self._job.session
                for model in [model for model in self._models if session.state(model).optimizer is optimizer]:
                    session.clip_grad_norm_(model, limit)
            self._has_clipped = False

        return clip if limit else None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left its last step out for an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Generator[None]:
        """Compute in mixed precision within, where the Accelerator has one that is not the plan's."""
        handler = autocast_handler or self.autocast_handler
        if not self.native_amp:
            yield
            return
        caches = handler.cache_enabled
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=handler.enabled, cache_enabled=caches):
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Generator[torch.profiler.profile]:
        """Profile what is within by torch's profiler."""
        handler = profile_handler or self.profile_handler
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        from pathlib import Path

        folder = Path(handler.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{self._job.session.rank}.json"))
        self.wait_for_everyone()


def _listed(parameters: Any) -> Any:
    return [*parameters] if isinstance(parameters, Iterable) and not isinstance(parameters, Tensor) else parameters
