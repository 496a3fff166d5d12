"""Draw families by a seed, run each under every plan, and write `docs/models.md`: `make families`.

python -m benchmarks.families                 goes on where it was left, family by family
python -m benchmarks.families --draw          only says what is drawn
python -m benchmarks.families --page          only writes the page, from what is there
python -m benchmarks.families t5 vit --again  runs some families again
"""

from __future__ import annotations

import argparse
import json
import selectors
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._results import RESULTS, ROOT, log, versions

SEED = 20_261_125
RESULT = RESULTS / "families.json"
WORK = ROOT / "build" / "families"
_CELL_SECONDS = 600.0
"""A cell that takes longer hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--draw", action="store_true", help="only draw")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of those that are drawn; by default all")
    parser.add_argument("--again", action="store_true", help="also what has been run before")
    parser.add_argument("--plans", nargs="*", metavar="PLAN", help="only these plans")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    if not options.page:
        _run(options)
    if not options.draw:
        from benchmarks.families._page import write_page

        write_page(json.loads(options.result.read_text()))


def _run(options: argparse.Namespace) -> None:
    from benchmarks.families._cells import EXPERTS, PLANS
    from benchmarks.families._draw import Drawn, Redrawn, as_json, draw, own_modules

    result: dict[str, Any] = json.loads(options.result.read_text()) if options.result.exists() else {}
    known = versions("transformers")
    is_same = result.get("seed") == options.seed and _library(result["versions"]) == _library(known)
    kept = result["families"] if is_same else {}
    if is_same and all((WORK / one["name"]).exists() for one in result["drawn"] if one["auto"]):
        drawn = [Drawn(**one) for one in result["drawn"]]
        redrawn = [Redrawn(**one) for one in result["redrawn"]]
    else:
        drawn, redrawn = draw(options.seed, WORK)
        drawn += own_modules()
        for one in redrawn:
            log(f"redrawn  {one.kind:16s} {one.name:24s} {one.why}")
    result = {"seed": options.seed, "versions": known, **as_json(drawn, redrawn), "families": kept}
    names = options.plans or list(PLANS)
    for one in drawn:
        if options.families and one.name not in options.families:
            continue
        done = {} if options.again else kept.get(one.name, {"cells": {}})["cells"]
        missing = [name for name in names if name not in done and (name != EXPERTS or one.kind == "mixture")]
        log(f"{one.kind:16s} {one.name:24s} {one.architecture:40s} {one.parameters:>9,}")
        if options.draw or not missing:
            continue
        before = kept.get(one.name, {"cells": {}})
        kept[one.name] = _cells(one, missing, before)
        commits = [] if set(missing) == set(PLANS) else kept[one.name].get("commits", [])
        kept[one.name]["commits"] = sorted({*commits, known["weft_commit"]})
        result["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        options.result.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _library(known: dict[str, str]) -> str:
    """What a draw depends on beside its seed."""
    return known["transformers"]


def _cells(drawn: Any, names: list[str], before: dict[str, Any]) -> dict[str, Any]:
    """All cells of a family, each in a process with those before it, unless one hangs or kills it."""
    found: dict[str, Any] = {**before, "cells": dict(before["cells"])}
    left = list(names)
    while left:
        command = [sys.executable, "-m", "benchmarks.families._cells", json.dumps(asdict(drawn)), str(WORK), *left]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            ended = _take(process, left, found)
            if left:
                process.kill()
                name = left.pop(0)
                error = (process.stderr.read() if process.stderr else "").strip().splitlines()
                outcome = "traceback" if ended else "hang"
                found["cells"][name] = {"outcome": outcome, "why": error[-1] if error else "", "seconds": 0.0}
                log(f"    {name:24s} {outcome}")
    return found


def _take(process: subprocess.Popen[str], left: list[str], found: dict[str, Any]) -> bool:
    """Read a family's lines until it ends, or says nothing for too long; return whether it ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        began = time.monotonic()
        while left:
            if not selector.select(_CELL_SECONDS):
                return False
            line = process.stdout.readline()
            if not line:
                return True
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            if "facts" in said:
                found |= said["facts"]
                continue
            left.remove(said["plan"])
            found["cells"][said.pop("plan")] = said
            log(f"    {said['outcome']:10s} {said['seconds']:6.1f} s  {said['why'][:110]}")
        log(f"    {time.monotonic() - began:.0f} s")
    return True


if __name__ == "__main__":
    main()
