"""The options that all benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._results import RESULTS


def options_parser(about: str | None, *, rounds: int | None) -> argparse.ArgumentParser:
    """`--rounds`, unless they are None, `--note` (kept with the result) and `--folder` (where results go)."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="interleaved rounds; figures are medians over them"
        )
    parser.add_argument("--note", default="", help="kept with the result, such as what else the machine did")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the result is written")
    return parser
