"""Judge single cells, in processes of their own: `python tests/parity/one_cell.py [--backend B] PRECISION CELL …`.

Prints one line of JSON per cell.  For a look at one cell of the matrix, and for compiled cells, after which Dynamo
leaves things behind that the suite would count against the shared pool.  `--backend cpu:weft`: over shared memory;
`--bits`: which bits of one step are others than over Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

import matrix  # noqa: E402 - the path of the pool comes first
from bits import differing  # noqa: E402
from parity_run import Matrix  # noqa: E402
from pool import RankPool  # noqa: E402


def main(precision: str, names: Sequence[str], backend: str, bits: bool) -> None:
    known = {str(cell): cell for cell in matrix.FULL}
    ranks = RankPool(8)
    try:
        with tempfile.TemporaryDirectory() as folder:
            parity = Matrix.create(ranks, Path(folder), backend=backend)
            for name in names:
                if bits:
                    found = differing(parity, known[name], precision)
                    print(json.dumps({"cell": name, "differing": found}), flush=True)
                    continue
                verdict = parity.verdict(known[name], precision)
                shown = {"cell": name, **asdict(verdict), "failures": verdict.failures(precision)}
                print(json.dumps(shown), flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("precision")
    parser.add_argument("cells", nargs="+", metavar="CELL")
    parser.add_argument("--backend", default="gloo", help="of every process group")
    parser.add_argument("--bits", action="store_true", help="compare shared memory with Gloo")
    options = parser.parse_args()
    main(options.precision, options.cells, options.backend, options.bits)
