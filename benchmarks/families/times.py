"""How long a user waits for `weft describe`, `weft plan` and `weft check` on models that nobody chose.

    python -m benchmarks.families.times

For each drawn family (`make families` has written their folders) each command runs as a fresh process, with an empty
cache of its own and then once more.  The plan is what `auto` chooses for this machine, so `weft check` with an empty
cache does all three: it describes the model, plans, and compares the plan with one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from benchmarks.families.__main__ import RESULT, WORK
from benchmarks.families._cells import ways_of
from benchmarks.families._draw import Drawn
from weft.config.recipe import dump_recipe

_COMMANDS = ("describe", "plan", "check")
_SECONDS = 10.0


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of those that are drawn; by default all")
    options = parser.parse_args()
    about = {"machine": machine(), "versions": versions("transformers"), "note": options.note}
    samples: dict[str, Any] = {}
    for one in json.loads(RESULT.read_text())["drawn"]:
        if options.families and one["name"] not in options.families:
            continue
        samples[one["name"]] = _times(Drawn(**one))
        log(f"{one['name']:24s} {samples[one['name']]}")
    goals = [_goal(samples, command, which) for which in ("first", "again") for command in _COMMANDS]
    write_result("families-times", goals=goals, samples=samples, about=about, folder=options.folder)


def _goal(samples: dict[str, Any], command: str, which: str) -> Goal:
    values = [one[which][command] for one in samples.values() if one["all ran"]]
    return Goal(
        what=f"weft {command}, {'with an empty cache' if which == 'first' else 'once more'}, median over families",
        measured=median(values),
        goal=_SECONDS,
        better="lower",
        spread=spread(values),
        unit=" s",
    )


def _times(drawn: Drawn) -> dict[str, Any]:
    """Seconds of each command, with an empty cache and again, and whether all came to a result."""
    recipe = ways_of(drawn, WORK).recipe
    found: dict[str, Any] = {"all ran": True}
    with tempfile.TemporaryDirectory(prefix="families-times-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(dump_recipe(recipe))
        for which in ("first", "again"):
            found[which] = {}
            for command in _COMMANDS:
                began = time.monotonic()
                ran = subprocess.run(
                    [sys.executable, "-m", "weft.cli", command, str(file)],
                    cwd=ROOT,
                    env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache-of-{command}"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                found[which][command] = round(time.monotonic() - began, 2)
                if ran.returncode:
                    found["all ran"] = False
                    log(f"    weft {command}: {ran.stderr.strip().splitlines()[-1:]}")
    return found


if __name__ == "__main__":
    main()
