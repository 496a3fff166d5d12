"""Steps: backward, clipping, accumulation."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RecipeError
from weft.fabric._place import FabricPlace
from weft.fabric.wrappers import closed_step, is_wrapped, module_of


class FabricSteps(FabricPlace):
    """Calls of a loop between a forward and `optimizer.step()`."""

    _is_last: bool | None = None
    """Whether the loop says that a backward is the last of its step; None: it does not say."""
    _heard = 0
    """Optimizers whose steps this one hears of."""

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Add a loss's gradients to those of every model that it reaches.  It is a mean over this rank's samples.

        Before anything was set up it is torch's own backward.
        """
        del model
        if not self._has_set_up:
            tensor.backward(*args, **kwargs)
            return
        keeps = bool(kwargs.pop("retain_graph", False))
        others = [name for name, value in kwargs.items() if value not in (None, False)]
        if args or others:
            named = ", ".join(others) or "gradient"
            raise RecipeError(f"fabric.backward({named}=…) is not had. Give it a loss, and retain_graph= alone.")
        self._watch_steps()
        self._session.backward(tensor, retain_graph=keeps, is_last=self._is_last)

    def _watch_steps(self) -> None:
        """Stand before the methods that the first forward has put into the optimizers."""
        for optimizer in self._optimizers[self._heard :]:
            vars(optimizer)["step"] = self._telling(optimizer)
        self._heard = len(self._optimizers)

    def _telling(self, optimizer: torch.optim.Optimizer) -> Any:
        stepped, depth = optimizer.step, [0]

        @wraps(stepped)
        def step(_: Any, closure: Any = None) -> Any:
            if closure is not None:
                return closed_step(optimizer, closure)
            depth[0] += 1  # the session's own step comes here again for the update itself
            try:
                stepped()
            finally:
                depth[0] -= 1
            if not depth[0]:
                self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)
            return None

        return MethodType(step, optimizer)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Generator[None]:
        """Say that a backward within is not the step's last, or with `enabled=False` that it is: gradients are reduced
        while that one goes on."""
        if not is_wrapped(module):
            raise RecipeError(
                "fabric.no_backward_sync() was given a model that was not set up. Give what setup returned."
            )
        before, self._is_last = self._is_last, not enabled
        try:
            yield
        finally:
            self._is_last = before

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip a model's gradients by their global norm, which is returned, or each element of them.

        Raises:
            RecipeError: both or neither is asked for, or another norm than the second.
            RuntimeError: the norm is no finite number, and `error_if_nonfinite`.
        """
        del optimizer
        if (clip_val is None) == (max_norm is None):
            raise RecipeError("fabric.clip_gradients() wants one of clip_val and max_norm. Give one.")
        if clip_val is not None:
            self._session.clip_grad_value_(module_of(module), clip_val)
            return None
        assert max_norm is not None
        if float(norm_type) != 2.0:
            raise RecipeError(f"fabric.clip_gradients(norm_type={norm_type}) is not had: gradients have their 2-norm.")
        norm = self._session.clip_grad_norm_(module_of(module), max_norm)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; error_if_nonfinite=False would go on")
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which torch computes as a forward of a model that was set up does."""
        return self._arguments.numbers.context(self.device)
