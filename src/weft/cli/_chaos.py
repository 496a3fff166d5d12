"""`weft chaos`."""

from __future__ import annotations

import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.errors import RecipeError


def chaos(
    subject: Path,
    /,
    *,
    plan: Annotated[tuple[Path, ...], Parameter(negative=(), show_default=False)] = (),
    seed: int = 0,
    num: int | None = None,
    minutes: float = 5.0,
    faults: str = "all",
    replay: str | None = None,
    results: Annotated[Path | None, Parameter(show_default=False)] = None,
) -> int:
    """Let seeded faults come into short runs of a recipe, or of a script, on this machine, and judge each.

    After each fault: it was found in time, the report names the right rank and cause, the losses are those of the run
    without it, the ledger of samples is whole, and nothing is left behind. Status 1 where one went wrong.

    Parameters
    ----------
    subject
        A recipe, or a Python script with a weft.session, which is run as by `weft launch`: within a minute, with
        two saves and five steps behind them.
    plan
        A plan to run under; give it several times. By default data 2, ZeRO-3, tensor 2 and pipeline 2, as far as the
        recipe allows; of a script data 2 and ZeRO-3.
    seed
        Draws the faults. The same seed, recipe, plans and faults draw the same ones.
    num
        How many; by default as many as there is time for.
    minutes
        Time after which no further fault begins.
    faults
        `all`, or names with commas between them.
    replay
        SEED:INDEX of one fault, as a report names it.
    results
        File for the results as JSON; by default chaos-DATE-SEED.json.
    """
    from weft.api.chaos import Campaign, chosen_kinds
    from weft.api.chaos.campaign import replay_words, write_result
    from weft.api.chaos.plans import default_plans, given_plans
    from weft.config.recipe import load_recipe

    kinds = chosen_kinds(faults)
    indices = range(num) if num is not None else range(1 << 30)
    if replay is not None:
        seed, index = _read_replay(replay)
        indices = range(index, index + 1)
    loaded = None if subject.suffix == ".py" else load_recipe(subject)
    plans = given_plans(loaded, plan) if plan else default_plans(loaded)
    words = replay_words(subject, [str(path) for path in plan], faults)
    until = time.monotonic() + 60 * minutes
    print(
        f"chaos     seed {seed}, {len(kinds)} kinds of faults, under {', '.join(name for name, _ in plans)}", flush=True
    )
    runs = loaded or subject.resolve()
    with Campaign(runs, plans, kinds, seed, log=partial(print, flush=True), replay_words=words) as campaign:
        result = campaign.result
        try:
            for index in indices:
                if time.monotonic() > until:
                    break
                campaign.run(index)
        except KeyboardInterrupt:
            print("\nstopped by Ctrl-C; so far:")
        print("\n".join(["", *result.table(), ""]))
        path = results or Path(f"chaos-{date.today().isoformat()}-{seed}.json")
        write_result(result, path, {"subject": str(subject), "date": date.today().isoformat()})
        good = len(result.cases) - result.num_failed
        print(f"{'whole' if not result.num_failed else 'WRONG':<8}  {good} of {len(result.cases)} faults   {path}")
    return 1 if result.num_failed else 0


def _read_replay(text: str) -> tuple[int, int]:
    seed, _, index = text.partition(":")
    if not (seed.isdecimal() and index.isdecimal()):
        raise RecipeError(f"--replay {text} is no SEED:INDEX, such as 7:42. A report of a fault names it.")
    return int(seed), int(index)
