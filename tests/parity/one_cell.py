"""Judge single cells, in processes of their own: `python tests/parity/one_cell.py PRECISION CELL [CELL …]`.

Prints one line of JSON per cell.  For a look at one cell of the matrix, and for compiled cells, after which Dynamo
leaves things behind that the suite would count against the shared pool.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import matrix  # noqa: E402 - the path of the pool comes first
from parity_run import Matrix  # noqa: E402

from pool import RankPool  # noqa: E402


def main(precision: str, *names: str) -> None:
    known = {str(cell): cell for cell in matrix.FULL}
    ranks = RankPool(8)
    try:
        with tempfile.TemporaryDirectory() as folder:
            parity = Matrix.create(ranks, Path(folder))
            for name in names:
                verdict = parity.verdict(known[name], precision)
                shown = {"cell": name, **asdict(verdict), "failures": verdict.failures(precision)}
                print(json.dumps(shown), flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
