"""Which lines of Weft's rooms a rank runs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from weft.models import build_model
from weft.numerics import STEPS, run_trial
from weft.plan import Plan
from weft.recipe import Recipe

_ROOMS = ("/weft/parallel/", "/weft/techniques/", "/weft/comm/", "/weft/engine/")


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
