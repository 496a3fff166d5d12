"""`weft replan`."""

from __future__ import annotations

from pathlib import Path

from weft.cli._options import Overrides
from weft.errors import PlanError


def replan(run: Path, /, *, plan: Path | None = None, overrides: Overrides = ()) -> None:
    """Let a training that runs go on under another plan, at its next step and without losing one.

    Parameters
    ----------
    run
        Folder of the run, on this host.
    plan
        TOML file of the plan; by default the run's own, for single settings by --set. A plan that does not fit is
        refused, and the run goes on untouched.
    """
    from weft.config.plan import apply_overrides, load_plan
    from weft.config.recipe import load_recipe
    from weft.events import RunFolder
    from weft.run.supervise.replan import ask_for_plan

    if plan is None and not overrides:
        raise PlanError("nothing is to change. Give a plan by --plan, or its settings by --set plan.mesh.tensor=2.")
    for text in overrides:
        if not text.startswith("plan."):
            raise PlanError(f"--set {text}: a run that goes on keeps its recipe. Only settings of its plan may change.")
    folder = RunFolder.open(run)
    recipe = load_recipe(folder.recipe)
    _, changed = apply_overrides(recipe, load_plan(plan or folder.plan), list(overrides))
    print(f"accepted  {ask_for_plan(folder, changed)}")
