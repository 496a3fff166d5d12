"""What a loop does to the structure of a model between two steps: parameters that are taken out or exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, final

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from weft.errors import RecipeError


@final
class Structure:
    """Knows the parameters of a rank's modules, and refuses to go on without them.

    What a loop adds (a teacher, an average, a metric) is its own affair.  All is gone through when some module of the
    process was given a parameter or a module, and now and then: to do so in each step takes 0.5 % of one of 5 ms.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._checks, self._is_touched = 0, False
        touch = _Touch(weakref.ref(self))
        self._handles = [
            register_module_parameter_registration_hook(touch),
            register_module_module_registration_hook(touch),
        ]
        self._known = _names(parts)
        self._held: list[dict[str, Any]] = []
        self._entries: list[Any] = []
        self._look()

    def touch(self) -> None:
        """Some module was given a parameter or a module."""
        self._is_touched = True

    def let_go(self) -> None:
        """Watch no more."""
        while self._handles:
            self._handles.pop().remove()

    def note(self) -> None:
        """What is there now is as Weft has left it."""
        if not self._is_same():
            self._known = _names(self._parts)
            self._look()

    def check(self) -> None:
        """Refuse what the loop has done since `note`.

        Raises:
            RecipeError: a parameter was taken out, or has another one in its place.
        """
        self._checks += 1
        if not self._is_touched and self._checks & (self._checks - 1) and self._checks % 1000:
            return
        self._is_touched = False
        if self._is_same():
            return
        now = _names(self._parts)
        for name, parameter in self._known.items():
            if now.get(name) is not parameter:
                what = f"put another parameter in the place of {name}" if name in now else f"taken {name} out"
                raise RecipeError(
                    f"the loop has {what} since session.prepare, and the plan trains, saves and exports those that"
                    " prepare was given. Write into a weight (`with torch.no_grad(): parameter.copy_(new)`), or change"
                    " the model before prepare: state.export() first, and a new session with the changed model."
                )
        self._look()

    def _look(self) -> None:
        modules = [module for part in self._parts for module in part.modules()]
        held = [each for module in modules for each in (vars(module)["_parameters"], vars(module)["_modules"])]
        self._held = [each for each in held if each]
        self._entries = [entry for each in self._held for entry in each.values()]

    def _is_same(self) -> bool:
        entries = [*chain.from_iterable(map(dict.values, self._held))]
        return len(entries) == len(self._entries) and all(map(is_, entries, self._entries))


class _Touch:
    """Tells of every registration in the process.  Weak, as torch holds it until it is taken out."""

    def __init__(self, structure: weakref.ref[Structure]) -> None:
        self._structure = structure

    def __call__(self, *_: Any) -> None:
        if (structure := self._structure()) is not None:
            structure.touch()


def _names(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: each for part in parts for name, each in part.named_parameters(remove_duplicate=False)}
