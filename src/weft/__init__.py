"""Weft: plan it, prove it, run it, watch it, walk away with it.

Importing `weft` imports nothing heavy; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.version import VERSION as __version__

if TYPE_CHECKING:
    from weft.api import CheckReport as CheckReport
    from weft.api import RunResult as RunResult
    from weft.api import Session as Session
    from weft.api import TrainState as TrainState
    from weft.api import check as check
    from weft.api import export as export
    from weft.api import generate as generate
    from weft.api import session as session
    from weft.api import spawn as spawn
    from weft.api import train as train
    from weft.config.cluster import Cluster as Cluster
    from weft.config.plan import Plan as Plan
    from weft.config.recipe import Recipe as Recipe
    from weft.errors import WeftError as WeftError
    from weft.events import StepEvent as StepEvent
    from weft.model.families import CutTable as CutTable
    from weft.model.families import SplitRule as SplitRule


_PACKAGES = {
    "CheckReport": "weft.api",
    "Cluster": "weft.config.cluster",
    "CutTable": "weft.model.families",
    "Plan": "weft.config.plan",
    "Recipe": "weft.config.recipe",
    "RunResult": "weft.api",
    "Session": "weft.api",
    "SplitRule": "weft.model.families",
    "StepEvent": "weft.events",
    "TrainState": "weft.api",
    "WeftError": "weft.errors",
    "check": "weft.api",
    "export": "weft.api",
    "generate": "weft.api",
    "session": "weft.api",
    "spawn": "weft.api",
    "train": "weft.api",
}

__all__ = ["__version__", *_PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll] - loaded on first use


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if _PACKAGES[name] == "weft.api":
        importlib.import_module("weft.run.launch.excepthook")
    return getattr(importlib.import_module(_PACKAGES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
