"""Run `weft.check` on cases, in the source tree that PYTHONPATH names: `child.py CASE…`.

Prints one line of JSON per case, and stops at the first that is not equal.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import cases as _cases  # noqa: E402, F401 - puts the parity matrix on the path


def comparison(recipe: Any, plan: Any) -> dict[str, Any]:
    """What the check says: equal, different (what, and by how much), refused, or stopped with an error."""
    import weft

    try:
        report = weft.check(recipe, plan, explain=False)
    except weft.WeftError as error:
        return {"equal": False, "how": "refused", "what": str(error)}
    except Exception as error:
        return {"equal": False, "how": "error", "what": f"{type(error).__name__}: {error}"}
    if report.failure is None:
        return {"equal": True, "how": "equal", "what": report.result_lines()[0]}
    first = report.failure.mismatch
    if first is None:
        return {"equal": False, "how": "error", "what": report.failure.cause}
    what = f"{first.kind} {first.name} differs by {first.relative:.1e} in {report.failure.precision}"
    return {
        "equal": False,
        "how": "different",
        "what": what + (f"; {report.failure.cause}" if report.failure.cause else ""),
    }


def main(names: list[str]) -> None:
    import cells
    import matrix

    import weft

    known = {str(cell): cell for cell in matrix.FULL}
    with tempfile.TemporaryDirectory() as folder:
        models = cells.models(Path(folder))
        for name in names:
            cell = known[name]
            found = comparison(cells.recipe_of(models[cell.model], "fp64"), cell.plan)
            print(json.dumps({"case": name, "tree": weft.__file__, **found}), flush=True)
            if not found["equal"]:
                return


if __name__ == "__main__":
    main(sys.argv[1:])
