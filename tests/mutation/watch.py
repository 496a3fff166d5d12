"""Which lines of Weft's rooms a rank runs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.build import build_model
from weft.verify.numerics import STEPS, run_trial

_ROOMS = ("/weft/techniques/core/", "/weft/techniques/", "/weft/comm/", "/weft/run/engine/")


def run_rank(recipe: Recipe, plan: Plan) -> list[tuple[str, int]]:
    """Run a trial and return (file, line) of everything in the rooms that ran, hooks and backward included."""
    seen: set[tuple[str, int]] = set()
    wanted: dict[str, bool] = {}

    def line(frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, value: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in wanted:
            wanted[name] = any(room in name for room in _ROOMS)
        return line if wanted[name] else None

    sys.settrace(call)
    try:
        run_trial(recipe, plan, lambda: build_model(recipe), steps=STEPS)
    finally:
        sys.settrace(None)
    return sorted(seen)
