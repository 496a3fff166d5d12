"""Run the benchmarks one after another, each in a process of its own, then write the table and the plots.

python -m benchmarks                      all of them, nearly two hours on 2 cores
python -m benchmarks memory bubble        some
python -m benchmarks --report             only the table and the plots, from what is there
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks._report import write_report
from benchmarks._results import RESULTS, ROOT, log

BENCHMARKS = (
    *("memory", "bubble", "overhead", "techniques", "communication", "selector", "compression", "ahead", "offload"),
    *(
        "long_sequence",
        "beyond_memory",
        "search",
        "starting",
        "peers",
        "auto",
        "learned",
        "loading",
        "mixtures",
        "nets",
        "recovery",
        "hosts",
        "saves",
        "reloading",
        "goodput",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; by default all")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--note", default="", help="kept with the results, such as what else the machine did")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args()
    failed: list[str] = []
    for name in [] if options.report else options.names or BENCHMARKS:
        log(f"── {name} ──")
        command = [sys.executable, "-m", f"benchmarks.{name}", "--note", options.note, "--folder", str(options.folder)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    write_report(options.folder)
    if failed:
        sys.exit(f"These benchmarks failed: {', '.join(failed)}. Their older results, if any, stay.")


if __name__ == "__main__":
    main()
