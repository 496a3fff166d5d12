"""Files of a folder that each add one thing to Weft: a family of models, a sink of events, a launcher.

Such a folder is a package, and whatever module lies in it is found, by its name alone.  No list has to be kept beside
it: a file that is taken out is gone, and one that is put in is there.  Another distribution may add a folder of its own
to the package's `__path__`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def extensions_of(package: str) -> list[str]:
    """Return the names of a package's modules in alphabetical order, without those that begin with an underscore."""
    path = importlib.import_module(package).__path__
    return sorted({module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")})


def load_extension(package: str, name: str) -> ModuleType:
    """Import one of `extensions_of(package)`."""
    return importlib.import_module(f"{package}.{name}")
