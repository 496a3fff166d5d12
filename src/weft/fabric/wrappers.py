"""What `fabric.setup` returns for a model: a module that looks like it, and computes in the precision that was asked
for.  Optimizers and loaders stay the script's own objects, or look like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import MethodType
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weft.errors import RecipeError
from weft.fabric._absent import absent
from weft.fabric._precision import FabricPrecision

_OWN = frozenset(("_numbers", "_device", "_marked", "training"))
_MARK = "_weft_fabric"
"""Attribute by which an optimizer or a loader knows that it was set up."""


@final
class _FabricModule(nn.Module):
    """A model that was set up; `module` is the model itself, whose attributes this one has, too."""

    def __init__(self, module: nn.Module, numbers: FabricPrecision, device: torch.device) -> None:
        super().__init__()
        self._forward_module = module
        self._numbers, self._device, self._marked = numbers, device, {"training_step", "validation_step", "test_step"}

    @property
    def module(self) -> nn.Module:
        """The model as it was given."""
        return cast(nn.Module, self._modules["_forward_module"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._computed(self.module, args, kwargs)

    def _computed(self, called: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given, named = self._numbers.given((args, kwargs))
        with self._numbers.context(self._device):
            output = called(*given, **named)
        return self._numbers.returned(output)

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Let a method compute as `forward` does."""
        name = method if isinstance(method, str) else method.__name__
        if name == "forward" or not isinstance(getattr(self.module, name, None), MethodType):
            raise RecipeError(f"{name!r} is no method of {type(self.module).__name__} beside forward.")
        self._marked.add(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("_modules", {}).get("_forward_module")
        if name == "_forward_module" or module is None:
            return super().__getattr__(name)
        attribute = getattr(module, name)
        if name not in self._marked or not isinstance(attribute, MethodType):
            return attribute

        @wraps(attribute)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._computed(attribute, args, kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if "_marked" not in vars(self) or name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)


def closed_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
    """Compute a loss by a step's closure, and then step.

    Raises:
        RecipeError: the optimizer computes it several times.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RecipeError(
            "LBFGS computes the loss several times in a step, which a session does not. Use torch.optim.Adam."
        )
    with torch.enable_grad():
        loss = closure()
    optimizer.step()  # what the first forward, within, has put in its place
    return loss


def take_closures(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take a closure in its first step, which the model's first forward may stand in."""
    plain = optimizer.step

    @wraps(plain)
    def step(_: Any, closure: Any = None) -> Any:
        return plain() if closure is None else closed_step(optimizer, closure)

    vars(optimizer)["step"] = MethodType(step, optimizer)


def mark(thing: Any) -> None:
    """Note that an optimizer or a loader was set up."""
    setattr(thing, _MARK, True)


def is_wrapped(obj: object) -> bool:
    """Return whether a model, an optimizer or a loader was set up by a Fabric."""
    return isinstance(obj, _FabricModule) or _MARK in getattr(obj, "__dict__", {})


def module_of(model: Any) -> Any:
    """Return a model as it was before it was set up."""
    return model.module if isinstance(model, _FabricModule) else model


def _unwrap_objects(collection: Any) -> Any:  # pyright: ignore[reportUnusedFunction] - scripts import it
    return tree_map(module_of, collection)


def wrapped(module: nn.Module, numbers: FabricPrecision, device: torch.device) -> nn.Module:
    """Return what a script goes on with for a model."""
    return _FabricModule(module, numbers, device)


__getattr__ = absent(
    __name__,
    {
        "Optimizers and loaders go on as they were: `is_wrapped(…)` says that one was set up.": "_FabricOptimizer"
        " _FabricDataLoader"
    },
)
