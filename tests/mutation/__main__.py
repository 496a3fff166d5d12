"""Mutation testing of `weft check`: `python -m tests.mutation --seed 0 --count 30 --jobs 2` (an hour on two cores).

1. Every case is checked once as it is, and the lines of Weft's rooms that it runs are noted.
2. Mutants of these lines are drawn (`mutants.py`).
3. Each is written into a copy of the source tree, and `weft.check` is run there on the cases that execute the
   statement, cheapest first, until one is not equal to one process.

The checkout itself is never changed.  Writes benchmarks/results/mutations.json and mutations.md.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import queue
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]

from cases import CASES  # noqa: E402 - beside this file
from mutants import Mutant, draw  # noqa: E402 - beside this file

import watch  # noqa: E402 - beside this file

RESULTS = ROOT / "benchmarks" / "results"
TIMEOUT_SECONDS = 600.0
"""Of one case of a mutant: one that keeps every rank busy for ever is caught so."""


def copy_tree(folder: Path) -> Path:
    """A copy of the sources in which mutants live."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compileall.compile_dir(folder / "src", quiet=1)
    return folder


def run_child(tree: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Check cases with the sources of a tree and return what came of each."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "child.py"), *names]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            command, env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=complaints, bufsize=0
        )
        assert process.stdout is not None
        with process, process.stdout as out:
            while len(found) < len(names):
                if not select.select([out], [], [], TIMEOUT_SECONDS)[0]:
                    process.kill()  # its ranks die with it
                    what = f"no result after {TIMEOUT_SECONDS:.0f} s"
                    found.append({"case": names[len(found)], "equal": False, "how": "hang", "what": what})
                    return found
                line = out.readline().decode()
                if not line:
                    break
                found += [json.loads(line)] if line.startswith("{") else []
        if process.returncode != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["died"])[-1]
            found.append({"case": names[len(found)], "equal": False, "how": "error", "what": last})
    for one in found:
        assert "tree" not in one or str(one["tree"]).startswith(str(tree)), f"{one['tree']} is not of {tree}"
    return found


def lines_of_cases() -> dict[str, dict[str, list[int]]]:
    """Case → file → lines that it runs, on any rank."""
    import cells
    import matrix
    from pool import RankPool

    known = {str(cell): cell for cell in matrix.FULL}
    found: dict[str, dict[str, list[int]]] = {}
    ranks = RankPool(8)
    try:
        with tempfile.TemporaryDirectory() as folder:
            models = cells.models(Path(folder))
            for name in CASES:
                cell = known[name]
                seen = ranks.run(cell.world, watch.run_rank, cells.recipe_of(models[cell.model], "fp64"), cell.plan)
                lines: dict[str, set[int]] = {}
                for file, line in (pair for rank in seen for pair in rank):
                    lines.setdefault(str(Path(file).relative_to(ROOT)), set()).add(line)
                found[name] = {file: sorted(numbers) for file, numbers in lines.items()}
                print(f"{name}: {sum(map(len, lines.values()))} lines", flush=True)
    finally:
        ranks.close()
    return found


def judge(mutant: Mutant, trees: queue.Queue[Path], lines: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Look for one mutant with every case that runs its statement."""
    names = [name for name in CASES if _runs(lines[name], mutant)]
    tree = trees.get()
    original = mutant.apply(tree)
    began = time.monotonic()
    try:
        found = run_child(tree, names)
    finally:
        (tree / mutant.file).write_text(original)
        trees.put(tree)
    last = found[-1]
    row = {
        "mutant": asdict(mutant),
        "caught": not last["equal"],
        "how": last["how"],
        "by": last["case"],
        "what": re.sub(r"/\S*/(?:tree\d+|site-packages)/", "", last["what"]),  # no paths of this machine
        "cases_run": len(found),
        "cases_that_execute_it": len(names),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(f"{'caught' if row['caught'] else 'SURVIVED':9}{row['how']:10}{row['seconds']:6.0f} s  {mutant}", flush=True)
    return row


def _runs(lines: Mapping[str, Sequence[int]], mutant: Mutant) -> bool:
    near = range(mutant.statement, max(mutant.line, mutant.statement) + 1)
    return bool(set(lines.get(mutant.file, ())) & set(near))


def table(rows: Sequence[Mapping[str, Any]], seed: int, explained: Mapping[str, str]) -> str:
    """The results as Markdown."""
    caught = [row for row in rows if row["caught"]]
    hows = Counter(row["how"] for row in caught)
    out = [
        "# Mutants of Weft's own source, looked for by `weft check`",
        "",
        f"{len(rows)} mutants of statements that the plans run, proposed by universalmutator, drawn with seed {seed}:"
        f" {len(caught)} caught ({', '.join(f'{count} {how}' for how, count in hows.most_common())}),"
        f" {len(rows) - len(caught)} not.",
        "`different`: a number is not that of one process; `error`: the ranks stop with one; `refused`: the plan is;"
        " `hang`: nothing comes in ten minutes.",
        "",
        "| # | where | before | after | caught | by | what it said |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(rows, 1):
        mutant = row["mutant"]
        said = row["what"].splitlines()[0][:160] if row["caught"] else "see below"
        cells = [
            str(number),
            f"{mutant['file'].removeprefix('src/weft/')}:{mutant['line']}",
            f"`{_one_line(mutant['before'])}`",
            f"`{_one_line(mutant['after'])}`",
            row["how"] if row["caught"] else "**no**",
            row["by"] if row["caught"] else f"{row['cases_run']} plans, all equal",
            said,
        ]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    left = [row["mutant"] for row in rows if not row["caught"]]
    if left:
        out += ["", "## Not caught", ""]
        out += [f"- `{_one_line(m['after'])}` ({m['file']}:{m['line']}): {explained[key_of(m)]}" for m in left]
    return "\n".join(out) + "\n"


def _one_line(text: str) -> str:
    return " ⏎ ".join(line.strip() for line in text.strip().splitlines())


def key_of(mutant: Mapping[str, Any]) -> str:
    """What names a mutant in the file of explanations, whatever line it stands in."""
    return f"{mutant['file']}: {_one_line(mutant['before'])} => {_one_line(mutant['after'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lines", type=Path, help="lines noted by an earlier run, instead of step 1")
    parser.add_argument("--name", default="mutations", help="of the result files")
    parser.add_argument("--again", type=int, help="look once more for the mutant of this number")
    parser.add_argument("--table", action="store_true", help="only write the Markdown anew, from the JSON")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    if options.again:
        report = json.loads(path.read_text())
        mutant = Mutant(**report["mutants"][options.again - 1]["mutant"])
        report["mutants"][options.again - 1] = look_for(options, lambda *_: [mutant])[0]
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    elif not options.table:
        report = {"seed": options.seed, "cases": list(CASES), "mutants": look_for(options, draw)}
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    report = json.loads(path.read_text())
    explained = json.loads((HERE / "explained.json").read_text())
    path.with_suffix(".md").write_text(table(report["mutants"], report["seed"], explained))
    print(f"{sum(row['caught'] for row in report['mutants'])} of {len(report['mutants'])} caught")


def look_for(options: argparse.Namespace, choose: Callable[..., list[Mutant]]) -> list[dict[str, Any]]:
    """Note the lines, choose mutants of them, and look for each."""
    with tempfile.TemporaryDirectory(prefix="weft-mutation-") as name:
        folder = Path(name)
        trees: queue.Queue[Path] = queue.Queue()
        for index in range(options.jobs):
            trees.put(copy_tree(folder / f"tree{index}"))
        first = trees.get()
        if options.lines and options.lines.exists():
            lines = json.loads(options.lines.read_text())
        else:
            lines = lines_of_cases()
            if options.lines:
                options.lines.write_text(json.dumps(lines))
        executed: dict[str, set[int]] = {}
        for files in lines.values():
            for file, numbers in files.items():
                executed.setdefault(file, set()).update(numbers)
        chosen = choose(first, executed, options.count, options.seed)
        trees.put(first)
        with ThreadPoolExecutor(options.jobs) as workers:
            return list(workers.map(lambda mutant: judge(mutant, trees, lines), chosen))


if __name__ == "__main__":
    main()
