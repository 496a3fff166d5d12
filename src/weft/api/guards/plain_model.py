"""A user's model as it was before a session: what Weft has put into it for a training is taken out at the end."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, cast, final

from torch import nn


@dataclass(frozen=True, slots=True)
class _Module:
    """A module as it was."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    children: dict[str, nn.Module | None]


@final
class PlainModel:
    """Remembers the modules of a model.  Only for plans under which every rank has the whole of it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            _Module(
                module,
                type(module),
                dict(vars(module)),
                cast("dict[str, nn.Module | None]", dict(vars(module)["_modules"])),
            )
            for module in model.modules()
        ]

    def put_back(self) -> None:
        """Take everything of Weft's out: classes, forwards, hooks, modules in the place of others.  What the loop has
        changed by itself stays, and so does what was learnt."""
        for known in self._modules:
            if known.module.__class__ is not known.kind and _is_of_weft(known.module.__class__):
                known.module.__class__ = known.kind
            for name, value in list(vars(known.module).items()):
                if name.endswith("_hooks") and hasattr(value, "items"):
                    for key in [key for key, hook in value.items() if _is_of_weft(hook)]:
                        del value[key]
                elif value is not known.attributes.get(name) and _is_of_weft(value):
                    if name in known.attributes:
                        vars(known.module)[name] = known.attributes[name]
                    else:
                        del vars(known.module)[name]
            self._restore_children(known)

    def _restore_children(self, known: _Module) -> None:
        children: dict[str, nn.Module | None] = vars(known.module)["_modules"]
        for name, child in children.items():
            before = known.children.get(name)
            if before is not None and child is not None and child is not before and _is_of_weft(type(child)):
                _take_over(before, child)
                children[name] = before


def _take_over(before: nn.Module, child: nn.Module) -> None:
    """Give a module what the one in its place has become: tensors, mode, and settings that a loop may change."""
    own = vars(before)
    for kept in ("_parameters", "_buffers"):
        own[kept].update({name: value for name, value in vars(child)[kept].items() if name in own[kept]})
    for name, value in vars(child).items():
        if name in own and isinstance(value, bool | int | float):
            own[name] = value


def _is_of_weft(value: object) -> bool:
    """Whether a class, a function, a method or an object was made by Weft's source."""
    if isinstance(value, functools.partial):
        return _is_of_weft(cast(Any, value.func))
    if isinstance(value, types.MethodType):
        return _is_of_weft(value.__func__) or _is_of_weft(value.__self__)
    if isinstance(value, types.FunctionType):  # one that wraps another bears the other's name
        return str(value.__globals__.get("__name__", "")).split(".")[0] == "weft"
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.split(".")[0] == "weft"
