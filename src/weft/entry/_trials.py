"""Where predictions cannot tell plans apart and the run is long, a few steps of each decide."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from weft.cluster import Cluster
from weft.entry._timed import time_plan
from weft.errors import WeftError
from weft.launch import RankError, place_from_environment
from weft.plan import Plan, dump_plan
from weft.recipe import Recipe, dump_recipe
from weft.search import Candidate, Choice, explain_settings

MOST_TRIALS = 4
_STEPS = 4
"""Of a trial, the first of them not timed."""
_START_SECONDS = 8.0
"""Of a trial: fresh processes, and a model."""
_STOPPED = ("SIGINT", "SIGTERM")
_WORTH = 30
"""Trials may take this part of the predicted run: a thirtieth."""


def decide_by_trials(
    recipe: Recipe,
    choice: Choice,
    machine: Cluster,
    *,
    tell: Callable[[str], None],
    folder: Path | None = None,
    steps: int | None = None,
) -> Choice:
    """Return the choice with the fastest of its close rivals as the plan, and the times as the reason.

    Nothing is tried inside a job, where the ranks run already, where one plan is clearly the best, where the run is
    too short for it to pay, or where no samples can be made up (a factory's model).  What was measured is kept by a
    hash of recipe, machine, plans and version.

    Args:
        tell: gets a line before each trial.
        folder: of kept measurements; by default `~/.cache/weft/auto`.
        steps: of the run, where it is not the recipe's.
    """
    close = close_rivals(choice)
    if len(close) < 2 or recipe.model.factory is not None or place_from_environment() is not None:
        return choice
    run_seconds = (steps or recipe.run.steps) * close[0].prediction.step_seconds
    if run_seconds < _WORTH * sum(_START_SECONDS + _STEPS * each.prediction.step_seconds for each in close):
        return choice
    plans = [each.plan for each in close if each.plan is not None]
    path = (folder or Path.home() / ".cache" / "weft" / "auto") / f"{_key(recipe, machine, plans)}.json"
    seconds = _kept(path, len(plans)) or _measure(recipe, plans, tell, path)
    if all(value is None for value in seconds):
        return choice
    return _decided(recipe, machine, choice, close, seconds)


def close_rivals(choice: Choice) -> list[Candidate]:
    """The chosen one, and others that differ in axes, ZeRO stage or precision and whose predicted step is within the
    spread of its own; the best of each, at most four."""
    found: dict[object, Candidate] = {}
    for rival in choice.rivals:
        limit = choice.rivals[0].prediction.step_seconds * (1 + choice.rivals[0].prediction.spread)
        if rival.plan is not None and rival.prediction.step_seconds <= limit:
            found.setdefault(_kind(rival.plan), rival)
    return list(found.values())[:MOST_TRIALS]


def _kind(plan: Plan) -> tuple[object, ...]:
    mesh = plan.mesh
    return mesh.data, mesh.tensor, mesh.pipeline, plan.data_parallel.zero, plan.compute.precision


def _measure(recipe: Recipe, plans: Sequence[Plan], tell: Callable[[str], None], path: Path) -> list[float | None]:
    """Time each plan; None for one that failed, which is said."""
    seconds: list[float | None] = []
    for number, plan in enumerate(plans):
        tell(f"trial     {number + 1} of {len(plans)}: {_name(plan)}")
        try:
            seconds.append(time_plan(recipe, plan, steps=_STEPS - 1).best_seconds)
        except WeftError as problem:
            if isinstance(problem, RankError) and problem.kind in _STOPPED:
                raise  # somebody wants the whole command to end
            tell(f"          failed: {str(problem).splitlines()[0]}")
            seconds.append(None)
    if None not in seconds:
        _keep(path, {"plans": [_name(plan) for plan in plans], "seconds": seconds})
    return seconds


def _decided(
    recipe: Recipe, machine: Cluster, choice: Choice, close: Sequence[Candidate], seconds: Sequence[float | None]
) -> Choice:
    """The choice with the fastest plan first; its axes' reason is what was measured."""
    timed = sorted((value, at) for at, value in enumerate(seconds) if value is not None)
    best = close[timed[0][1]]
    assert best.plan is not None
    rivals = (best, *(each for each in choice.rivals if each is not best))
    reasons = explain_settings(best.plan, recipe, machine, rivals)
    key = next(key for key in reasons if key.startswith("mesh."))
    others = [f"{_name(close[at].plan)}: {_told(value)}" for value, at in timed[1:]]
    reasons[key] = ", ".join([f"measured {_told(timed[0][0])} per step", *others])
    given = {name: why for name, why in reasons.items() if name not in best.plan.origins}
    return replace(choice, plan=best.plan, reasons=given, rivals=rivals)


def _name(plan: Plan | None) -> str:
    assert plan is not None
    mesh = plan.mesh
    axes = (("data", mesh.data), ("tensor", mesh.tensor), ("pipeline", mesh.pipeline))
    name = " × ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "1 process"
    zero = f" ZeRO-{plan.data_parallel.zero}" if mesh.data > 1 else ""
    return f"{name}{zero} {plan.compute.precision}"


def _told(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _key(recipe: Recipe, machine: Cluster, plans: Sequence[Plan]) -> str:
    """What the times depend on: neither the data nor the folders."""
    matters = Recipe(
        model=recipe.model, batch=recipe.batch, optimizer=recipe.optimizer, permit=recipe.permit, run=recipe.run
    )
    texts = [weft.__version__, machine.digest, dump_recipe(matters), *(dump_plan(plan) for plan in plans)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _kept(path: Path, count: int) -> list[float | None] | None:
    """Seconds of an earlier measurement; None where there is none that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content: dict[str, Any] = json.loads(path.read_text())
        seconds = [None if value is None else float(value) for value in content["seconds"]]
        if len(seconds) == count:
            return seconds
    return None


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a measurement; a folder that cannot be written only means that it is made again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text(json.dumps(content, indent=1))
        aside.replace(path)
