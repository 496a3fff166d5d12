"""`weft check`."""

from __future__ import annotations

import json as to_text

from weft.cli._options import Json, Overrides, PlanFile, RecipeFile
from weft.cli._read import read_choice
from weft.errors import WeftError

DIFFERS_STATUS = 1
CANNOT_STATUS = 2
"""Status of a plan that does not run: nothing was compared, so nothing differs."""


def check(
    recipe: RecipeFile,
    /,
    *,
    plan: PlanFile = "auto",
    overrides: Overrides = (),
    processes: int | None = None,
    explain: bool = True,
    json: Json = False,
) -> int:
    """Prove that a plan computes what one process computes, before a costly run.

    The model is made small and the plan's axes are scaled down to CPU processes of this machine. Status 0: equal; 1:
    something differs, and is named; 2: the plan or recipe is wrong, does not run, or cannot be checked.

    Parameters
    ----------
    processes
        The most processes to start; by default 8, or as many as the plan has axes for.
    explain
        When something differs, look for the likely cause and the techniques it takes.
    """
    from weft.run.launch.launcher import open_fork_server
    from weft.techniques.check import check_runnable

    with open_fork_server() as fork_server:  # which imports torch while this process does
        choice = read_choice(recipe, plan, overrides, None)
        check_runnable(choice.plan)  # before torch is imported
        from weft.api import check as run

        try:
            report = run(choice.recipe, choice.plan, processes=processes, explain=explain, fork_server=fork_server)
        except WeftError as error:
            error.status = CANNOT_STATUS
            raise
    print(to_text.dumps(report.to_json(), indent=2, ensure_ascii=False) if json else report)
    if report.is_equal:
        return 0
    return DIFFERS_STATUS if report.failure is not None and report.failure.mismatch is not None else CANNOT_STATUS
