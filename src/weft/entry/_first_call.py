"""A model that is brought under its plan when it is called first: until then it is plain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from weft.entry._batch_shape import taken_apart
from weft.errors import DataError, RecipeError

_CALL = "_call_impl"
"""What torch calls first of a module, before hooks: hooks that are set within a call come too late for it."""


@final
class FirstCall:
    """In place of a module's call.  `begin(args, kwargs)` is asked at every call until it has brought the model under
    its plan, which it says."""

    def __init__(self, model: nn.Module, begin: Callable[[Any, Any], bool]) -> None:
        self._model, self.begin = model, begin
        vars(model)[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.begin(args, kwargs):
            self.let_go()
            return self._model(*args, **kwargs)
        return getattr(type(self._model), _CALL)(self._model, *args, **kwargs)

    def let_go(self) -> None:
        """Let the model be called as ever."""
        if vars(self._model).get(_CALL) is self:
            del vars(self._model)[_CALL]

    def __reduce__(self) -> Any:
        """Copies and pickles of the model are plain: theirs is the method of its class."""
        return getattr, (self._model, _CALL)


def example_of(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a forward was given by the names of its arguments, as a batch whose samples lie along dim 0.

    Raises:
        RecipeError: it has none that says its samples, or takes them by `*args`.
    """
    parameters = inspect.signature(model.forward).parameters
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    given: dict[str, Any] = {}
    for name, value in bound.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise RecipeError(
                f"{type(model).__name__}.forward takes what it is given by *{name}, so nothing says what its arguments"
                " are. Name them: def forward(self, first, second)."
            )
        named = cast(Mapping[str, Any], value) if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else None
        given |= {name: value} if named is None else dict(named)
    rows = next((each.shape[0] for each in given.values() if isinstance(each, Tensor) and each.ndim), None)
    if rows is None:
        raise RecipeError(
            f"the first forward of {type(model).__name__} was given no tensor with a row for each sample. Give it one,"
            " or prepare the module that computes with samples."
        )
    try:
        taken_apart(given)
    except DataError:  # such as the state of a recurrent network, whose samples lie along another dim
        return {
            name: value.detach()
            for name, value in given.items()
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows
        }
    return given


@contextmanager
def as_prepared(model: nn.Module) -> Generator[None]:
    """A model in training and torch as it is outside of every context of the loop's: what is looked at and laid over a
    model must not depend on where it is called first."""
    modes = {name: module.training for name, module in model.named_modules()}
    if not model.training:  # an evaluation came first; of one in training, what is in evaluation is so on purpose
        model.train()
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
