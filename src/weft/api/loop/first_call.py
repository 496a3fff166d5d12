"""A model that is brought under its plan when it is called first: until then it is plain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.api.batches.batch_shape import CountedBatch, taken_apart, tensors_of
from weft.errors import DataError, RecipeError

_CALL = "_call_impl"
"""The method that torch calls first of a module, before hooks: hooks that are set within a call come too late for
it."""


@final
class FirstCall:
    """Replaces a module's call until its plan is chosen. `begin(args, kwargs)` is asked at every call until it returns
    that it has brought the model under its plan."""

    def __init__(self, model: nn.Module, begin: Callable[[Any, Any], bool]) -> None:
        self._model, self.begin = model, begin
        vars(model)[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.begin(args, kwargs):
            self.restore()
            return self._model(*args, **kwargs)
        return getattr(type(self._model), _CALL)(self._model, *args, **kwargs)

    def restore(self) -> None:
        """Give the model its own call back."""
        if vars(self._model).get(_CALL) is self:
            del vars(self._model)[_CALL]

    def __reduce__(self) -> Any:
        """Copies and pickles of the model are plain: theirs is the method of its class."""
        return getattr, (self._model, _CALL)


@final
class NamedArgumentsCall:
    """Replaces a module's call while it is looked at: arguments without a name in the forward have one here. A model
    that takes its arguments by `*args` or by position alone could not be called by name otherwise.

    Where a model takes what it is given by `*args` or by position alone, what looks at it could not call it otherwise.
    """

    def __init__(self, model: nn.Module, places: Sequence[str]) -> None:
        """`places`: names of what is given by position, in its order."""
        self._model, self._places = model, places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = [kwargs.pop(name) for name in self._places if name in kwargs]
        return getattr(type(self._model), _CALL)(self._model, *args, *own, **kwargs)

    def __reduce__(self) -> Any:
        return NamedArgumentsCall, (self._model, self._places)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a forward by their names."""

    example: CountedBatch
    """A batch, whose samples lie along dim 0."""
    places: Sequence[str]
    """Names of arguments that are given by position alone."""

    @contextmanager
    def by_name(self, model: nn.Module) -> Generator[None]:
        """The model, which may be called by all of these names."""
        if not self.places:
            yield
            return
        own = vars(model)
        own[_CALL] = NamedArgumentsCall(model, self.places)
        try:
            yield
        finally:
            del own[_CALL]


def called_with(model: nn.Module, args: Any, kwargs: Mapping[str, Any], samples: int | None) -> CallArguments:
    """Look at what a forward was given, perhaps of a batch of so many `samples`.

    Raises:
        RecipeError: nothing in it says its samples.
    """
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {}
    places: list[str] = []
    for name, value in inspect.signature(model.forward).bind(*args, **kwargs).arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            places = list(arguments)  # what stands before these is given by position, too
            numbered = {f"{name}_{number}": item for number, item in enumerate(value)}
            places, arguments = [*places, *numbered], arguments | numbered
        else:
            arguments[name] = value
            places += [name] if kind is inspect.Parameter.POSITIONAL_ONLY else []
    rows = _rows_of(arguments, samples)
    if rows is None:
        raise RecipeError(
            f"the first forward of {type(model).__name__} was given no tensor with a row for each sample. Give it one,"
            " or prepare the module that computes with samples."
        )
    # Not such as the state of a recurrent network, whose samples lie along another dim.
    arguments = {name: value for name, value in arguments.items() if _fits(value, rows)}
    return CallArguments(CountedBatch(tree_map_only(Tensor, Tensor.detach, arguments), rows), places)


def _rows_of(arguments: Mapping[str, Any], samples: int | None) -> int | None:
    """Samples that a forward was given: those of the batch in hand, where it has something with so many rows."""
    sizes = [tensor.shape[0] for tensor in tensors_of(arguments) if tensor.ndim]
    lists = [len(cast(Sequence[Any], each)) for each in arguments.values() if isinstance(each, list | tuple)]
    return samples if samples in (*sizes, *lists) else next(iter(sizes), None)


def _fits(value: Any, rows: int) -> bool:
    """Whether each of its tensors has a row for each sample, or is one of a list with one for each."""
    try:
        taken_apart(CountedBatch({"value": value}, rows))
    except DataError:
        return False
    return True


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
