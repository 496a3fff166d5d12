"""Names that Fabric has and this face has not: they can be imported, and say so when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import did_you_mean, not_had

DEVICES = "Weft runs on CPUs and CUDA devices."


def absent(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`.  `instead`: what to do → the names that are not had for it."""
    known = {name: what for what, names in instead.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}.{did_you_mean(name, known)}", name=name)
        return not_had(name, module, known[name])

    return find
