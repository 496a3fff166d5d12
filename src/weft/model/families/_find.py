"""Finding the file of a family by the `model_type` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from weft.extensions import extensions_of, load_extension
from weft.model.families._family import Family

_PACKAGE = "weft.model.families"


def families() -> Iterator[Family]:
    """Yield every family that has a file here, in the order of their names."""
    for name in extensions_of(_PACKAGE):
        yield _read(name)


def family_of(model_type: str) -> Family | None:
    """Return the family of a configuration's `model_type`, of the file called so or of one that names it; else None."""
    files = extensions_of(_PACKAGE)  # nothing that a configuration says is imported unless it stands there
    likely = [name for name in files if name == model_type]
    for name in (*likely, *files):
        family = _read(name)
        if model_type in family.model_types:
            return family
    return None


def _read(name: str) -> Family:
    return load_extension(_PACKAGE, name).FAMILY
