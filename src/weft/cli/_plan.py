"""`weft plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.cli._read import read_choice
from weft.errors import PlanError


def plan(
    recipe: Path,
    /,
    *,
    plan: str = "auto",
    cluster: str | None = None,
    processes: int | None = None,
    set: Annotated[tuple[str, ...], Parameter(negative=())] = (),  # noqa: A002 - the option is called --set
    output: Path | None = None,
    eject: Path | None = None,
) -> None:
    """Choose a plan for a recipe, and say why.

    Parameters
    ----------
    recipe
        TOML file that says what to train.
    plan
        TOML file that says how to split it, to look at or to eject; `auto` chooses one.
    cluster
        TOML file, or a spec such as 4x8xh100; by default this machine.
    processes
        How many processes; by default one per device that the batch can use.
    set
        One setting, such as recipe.batch.global_batch_size=64 or plan.mesh.tensor=2. May be given again.
    output
        File to write the plan to, for `weft train --plan`.
    eject
        Script to write: plain PyTorch that trains the recipe under the plan to the same losses, without Weft.
    """
    from weft.plan import describe_plan, dump_plan

    choice = read_choice(recipe, plan, set, processes, cluster)
    print("\n".join(describe_plan(choice.plan, choice.reasons, choice.facts, choice.cluster)))
    if output is not None:
        text = dump_plan(choice.plan, choice.reasons, header=[f"chosen by weft plan {recipe}"])
        try:
            output.write_text(text)
        except OSError as error:
            raise PlanError(f"{output} cannot be written: {error.strerror}. Name a file you may write.") from None
        print(f"\nwritten to {output}", file=sys.stderr)
    if eject is not None:
        from weft.cli._eject import eject_script

        eject_script(choice.recipe, choice.plan, eject)
