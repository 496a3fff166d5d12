"""`weft replan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from weft.cli._options import FLAG, Overrides
from weft.errors import PlanError


def replan(
    run: Path,
    /,
    *,
    plan: Path | None = None,
    overrides: Overrides = (),
    devices: int | None = None,
    auto: Annotated[bool, FLAG] = False,
) -> None:
    """Let a training that runs go on under another plan.

    It changes at its next step, and loses none.

    Parameters
    ----------
    run
        Folder of the run, on this host.
    plan
        TOML file of the plan; by default the run's own, for single settings by --set. A plan that does not fit is
        refused, and the run goes on untouched.
    devices
        Go on with so many devices, fewer or more, under a plan made from that of the run.
    auto
        Go on under the plan that is best by this run's own measurements, where it is better by more than noise.
    """
    from weft.config.plan import lay_over_plan, load_plan
    from weft.events import RunFolder
    from weft.run.supervise.replan import PlanRequest, ask_for_plan

    given = [name for name, has in (("--devices", devices is not None), ("--auto", auto)) if has]
    if len(given) > 1 or (given and (plan is not None or overrides)):
        others = [*given[1:], *(["--plan"] if plan is not None else []), *(["--set"] if overrides else [])]
        raise PlanError(f"{given[0]} finds a plan, so {' and '.join(others)} cannot go with it. Give one of them.")
    if given:
        print(ask_for_plan(RunFolder.open(run), PlanRequest(num_devices=devices)))
        return
    if plan is None and not overrides:
        raise PlanError(
            "nothing is to change. Give a plan by --plan, its settings by --set plan.mesh.tensor=2, a number of devices"
            " by --devices, or --auto."
        )
    for text in overrides:
        if not text.startswith("plan."):
            raise PlanError(f"--set {text}: a run that goes on keeps its recipe. Only settings of its plan may change.")
    folder = RunFolder.open(run)
    changed = lay_over_plan(load_plan(plan or folder.plan), list(overrides))
    print(ask_for_plan(folder, changed))
