"""Names that Fabric has and this face has not: they can be imported, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from weft.errors import RecipeError, did_you_mean

DEVICES = "Weft runs on CPUs and CUDA devices."


def absent(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`.  `instead`: what to do → the names that are not had for it."""
    known = {name: what for what, names in instead.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}.{did_you_mean(name, known)}", name=name)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise RecipeError(f"{module}.{name} is not had. {known[name]}")

        return type(name, (), {"__new__": refuse, "__module__": module})

    return find
