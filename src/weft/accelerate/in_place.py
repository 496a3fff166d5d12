"""This package where a program, or a library that it uses, imports `accelerate`.

Whether Accelerate is installed makes no difference: nothing of it is imported.  Libraries also ask for its version by
its distribution (`importlib.metadata`), so that is answered, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

from weft.accelerate import __version__
from weft.accelerate.unsupported import OWNER
from weft.errors import not_had

PEER = "accelerate"
_OWN = "weft.accelerate"


def stand_in() -> None:
    """Let `import accelerate`, and its modules, find this package from now on.

    Raises:
        RuntimeError: Accelerate was imported before.
    """
    if any(isinstance(finder, _PeerFinder) for finder in sys.meta_path):
        return
    if PEER in sys.modules:
        raise RuntimeError("accelerate was imported before Weft could stand in its place.")
    sys.meta_path.insert(0, _PeerFinder())


@final
class _PeerFinder(importlib.metadata.DistributionFinder, MetaPathFinder):
    """Finds modules of the peer's names in this package, and the peer's distribution."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del path, target
        if fullname != PEER and not fullname.startswith(f"{PEER}."):
            return None
        return ModuleSpec(fullname, _Loader(_OWN + fullname.removeprefix(PEER)), is_package=True)

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context | None = None) -> Any:
        if context is None or context.name in (None, PEER):
            yield _Distribution()


@final
class _Loader(Loader):
    """Gives a module of the peer's the names of this package's own; one that is not had says so when it is used."""

    def __init__(self, own: str) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        try:
            own = importlib.import_module(self._own)
        except ModuleNotFoundError as error:
            if error.name is None or not self._own.startswith(error.name):
                raise
            own = None

        def of(name: str) -> Any:
            if own is not None and (attribute := getattr(own, name, None)) is not None:
                return attribute
            if name.startswith("__"):
                raise AttributeError(name)
            return not_had(name, OWNER, "What needs it runs with Accelerate itself.")

        vars(module)["__getattr__"] = of
        if own is not None:
            module.__doc__, module.__file__ = own.__doc__, own.__file__


@final
class _Distribution(importlib.metadata.Distribution):
    """Metadata of the peer for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {PEER}\nVersion: {__version__}\n",
            "top_level.txt": f"{PEER}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path
