"""Seeded faults in runs of a small decoder under four plans and of a session under two: what `make chaos` runs.

    python -m benchmarks.chaos --num 1000 --seed 4

Campaigns of at most 80 faults, each with a seed of its own from `--seed` on, two side by side: most of a campaign's
time is spent waiting for time limits.  A fifth of all faults comes into the script `chaos_session.py`.  `weft chaos`
judges.  Kept are how many faults went wrong (the goal is none), how long reports took, and every fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread

_RECIPE = """
[model]
reference = "decoder"
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 16
dropout = 0.1
[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0
[batch]
global_batch_size = 8
[run]
steps = 24
"""
_SESSION = Path(__file__).with_name("chaos_session.py")
_SESSION_SHARE = 5
_CAMPAIGN_FAULTS, _SIDE_BY_SIDE = 80, 2
_LONGEST_MINUTES = 600


def campaign(subject: Path, folder: Path, seed: int, num: int) -> dict[str, Any]:
    """Run one campaign, saying its lines on standard error, and return its results."""
    results = folder / f"{subject.stem}-{seed}.json"
    command = [str(Path(sys.executable).with_name("weft")), "chaos", str(subject)]
    command += ["--seed", str(seed), "--num", str(num), "--minutes", str(_LONGEST_MINUTES), "--results", str(results)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log(f"{subject.stem} {seed}: {line.rstrip()}")
    if not results.is_file():
        raise RuntimeError(f"the campaign of seed {seed} ended with status {process.returncode} and without results")
    return {**json.loads(results.read_text()), "subject": subject.name}


def shared_out(num: int) -> tuple[list[int], list[int]]:
    """The faults of each campaign of the recipe, and of each of the session."""
    of_session = num // _SESSION_SHARE
    parts = [
        [min(_CAMPAIGN_FAULTS, total - at) for at in range(0, total, _CAMPAIGN_FAULTS)]
        for total in (num - of_session, of_session)
    ]
    return parts[0], parts[1]


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--num", type=int, default=200, help="faults in all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first campaign")
    options = parser.parse_args()
    before = machine()
    of_recipe, of_session = shared_out(options.num)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_SIDE_BY_SIDE) as threads:
        folder = Path(name)
        (folder / "recipe.toml").write_text(_RECIPE)
        running = [
            threads.submit(campaign, subject, folder, options.seed + number, num)
            for subject, parts in ((folder / "recipe.toml", of_recipe), (_SESSION, of_session))
            for number, num in enumerate(parts)
        ]
        campaigns = [one.result() for one in running]
    faults = [{"subject": one["subject"], "seed": one["seed"], **fault} for one in campaigns for fault in one["faults"]]
    wrong = [fault for fault in faults if fault["problems"]]
    crashes = [fault["detected_seconds"] for fault in faults if fault["fault"] in ("killed", "segfault", "torn-save")]
    crashes = [seconds for seconds in crashes if seconds is not None]
    goals = [
        Goal(what=f"faults that went wrong, of {len(faults)}", measured=len(wrong), goal=0, better="lower"),
        Goal(
            what="a killed rank to its report",
            measured=sorted(crashes)[len(crashes) // 2],
            goal=1.0,
            better="lower",
            spread=spread(crashes),
            unit=" s",
        ),
    ]
    settings = {
        "seeds": [f"{one['subject']} {one['seed']}" for one in campaigns],
        "plans": list(dict.fromkeys(plan for one in campaigns for plan in one["plans"])),
        "left_out": campaigns[0]["left_out"],
        "num_false_alarms": sum(one["num_false_alarms"] for one in campaigns),
    }
    about = {"machine": before, "versions": versions(), "settings": settings, "note": options.note}
    write_result("chaos", goals=goals, samples={"faults": faults}, about=about, folder=options.folder)
    if wrong:
        sys.exit(f"{len(wrong)} of {len(faults)} faults went wrong.")


if __name__ == "__main__":
    main()
