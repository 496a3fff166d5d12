"""Finding the file of a family by the `model_type` of a configuration."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from weft.model.families._family import Family


def families() -> Iterator[Family]:
    """Yield every family that has a file here, in the order of their names."""
    for name in _files():
        yield _read(name)


def family_of(model_type: str) -> Family | None:
    """Return the family of a configuration's `model_type`, of the file called so or of one that names it; else None."""
    files = _files()
    likely = [name for name in files if name == model_type]
    for name in (*likely, *files):
        family = _read(name)
        if model_type in family.model_types:
            return family
    return None


def _files() -> list[str]:
    """Names in this folder: nothing that a configuration says is imported unless it stands here."""
    folder = str(Path(__file__).parent)
    return sorted(file.name for file in pkgutil.iter_modules([folder]) if not file.name.startswith("_"))


def _read(name: str) -> Family:
    return importlib.import_module(f"weft.model.families.{name}").FAMILY
