"""The drawn battery: programs of modules, losses and loops, each in plain PyTorch and in sessions under six settings.

    PYTHONPATH=src:tests/support:tests/battery .venv/bin/python tests/battery/run_battery.py 0 500

Verdicts are kept in a file, and a second start goes on where the first was left.  A program is looked at with
`python tests/battery/battery_programs.py SEED`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from battery_play import BAD, judged
from battery_programs import chosen, drawn
from battery_runs import SETTINGS
from pool import RankPool

PACK = 10
"""Programs that the same processes play, one after another."""
SHORT = {"equal": "=", "refused": "r", "FALSE ALARM": "A", "WORDS": "w", "WRONG": "W", "TRACEBACK": "T", "HANG": "H"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Verdicts by strange thing and setting, and by kind."""
    lines = [f"{'strange thing':58}" + "".join(f"{name:>12}" for name in SETTINGS)]
    single: dict[tuple[str, ...], Counter[tuple[str, str]]] = {}
    for row in rows:
        single.setdefault(tuple(row["strange"]), Counter())[row["setting"], row["verdict"]] += 1
    for strange, counts in sorted(single.items()):
        cells = []
        for setting in SETTINGS:
            found = Counter({verdict: n for (name, verdict), n in counts.items() if name == setting})
            cells.append(" ".join(f"{SHORT.get(v, v)}{n if n > 1 else ''}" for v, n in sorted(found.items())))
        lines.append(f"{' + '.join(strange)[:57] or 'healthy':58}" + "".join(f"{cell:>12}" for cell in cells))
    totals = Counter((row["setting"], row["verdict"]) for row in rows)
    for verdict in (*SHORT, "BROKEN"):
        lines.append(f"{verdict:58}" + "".join(f"{totals[name, verdict]:>12}" for name in SETTINGS))
    return "\n".join(lines)


def findings(rows: Sequence[dict[str, Any]]) -> str:
    """What is not as it should be, a line each."""
    lines = []
    for row in rows:
        if row["verdict"] in (*BAD, "BROKEN"):
            text = " ".join(row["text"].split())[:400]
            name = " + ".join(row["strange"]) or "healthy"
            lines.append(
                f"{row['verdict']:11} seed {row['seed']} {row['setting']}: [{name}] {text} ({row.get('where')})"
            )
    return "\n".join(lines)


def again(seeds: Sequence[int], path: Path) -> list[int]:
    """Those of some seeds with something strange that was bad under some setting, or is not in the file of verdicts."""
    rows = _read(path)
    bad = {name for row in rows if row["verdict"] in BAD for name in row["strange"]}
    good = {name for row in rows for name in row["strange"]} - bad
    return [seed for seed in seeds if not good.issuperset(drawn(seed).strange)]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(options: list[str]) -> int:
    """Return 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description="Run the drawn battery.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="one past the last seed")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument(
        "--again", type=Path, help="only what is not as it should be, or missing, in this file of verdicts"
    )
    parser.add_argument("--every", type=int, default=1, help="of so many seeds one")
    parser.add_argument("--chosen", action="store_true", help="of these seeds the ones that `make test` plays")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--strange", nargs="+", help="these strange things in place of the seeds' own")
    parser.add_argument("--keep", type=Path, help="file of verdicts (JSON lines); goes on where it was left")
    given = parser.parse_args(options)
    rows = (
        [json.loads(line) for line in given.keep.read_text().splitlines()] if given.keep and given.keep.exists() else []
    )
    known = {row["seed"] for row in rows}
    seeds = [seed for seed in range(given.first, given.last, given.every) if seed not in known]
    seeds = [seed for seed in seeds if not given.chosen or seed in chosen()]
    seeds = again(seeds, given.again) if given.again else seeds
    ranks, begun = RankPool(2), time.monotonic()
    strange = tuple(given.strange) if given.strange else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            while seeds and time.monotonic() - begun < given.seconds:
                pack, seeds = seeds[:PACK], seeds[PACK:]
                new = list(judged(ranks, Path(folder), pack, lambda seed: given.settings, strange))
                rows += new
                if given.keep:
                    with given.keep.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in new)
                for line in findings(new).splitlines():
                    print(line, flush=True)
        finally:
            ranks.close()
    print(table(rows))
    print(f"{len({row['seed'] for row in rows})} programs; {len(seeds)} left; {time.monotonic() - begun:.0f} s")
    return int(any(row["verdict"] in BAD for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
