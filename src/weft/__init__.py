"""Weft: plan it, prove it, run it, watch it, walk away with it.

Importing `weft` imports nothing heavy; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.cluster import Cluster as Cluster
    from weft.entry import CheckReport as CheckReport
    from weft.entry import RunResult as RunResult
    from weft.entry import Session as Session
    from weft.entry import TrainState as TrainState
    from weft.entry import check as check
    from weft.entry import export as export
    from weft.entry import generate as generate
    from weft.entry import session as session
    from weft.entry import spawn as spawn
    from weft.entry import train as train
    from weft.errors import WeftError as WeftError
    from weft.events import StepEvent as StepEvent
    from weft.plan import Plan as Plan
    from weft.recipe import Recipe as Recipe

__version__ = "0.1.0"

_PACKAGES = {
    "CheckReport": "weft.entry",
    "Cluster": "weft.cluster",
    "Plan": "weft.plan",
    "Recipe": "weft.recipe",
    "RunResult": "weft.entry",
    "Session": "weft.entry",
    "StepEvent": "weft.events",
    "TrainState": "weft.entry",
    "WeftError": "weft.errors",
    "check": "weft.entry",
    "export": "weft.entry",
    "generate": "weft.entry",
    "session": "weft.entry",
    "spawn": "weft.entry",
    "train": "weft.entry",
}

__all__ = ["__version__", *_PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll] - loaded on first use


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if _PACKAGES[name] == "weft.entry":
        importlib.import_module("weft.launch.last_words")
    return getattr(importlib.import_module(_PACKAGES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
