"""`python -m weft.accelerate script.py`: run a program for Accelerate as it is, on Weft.

weft launch -n 4 --accelerate script.py …          the same on four processes
torchrun --nproc-per-node 4 -m weft.accelerate script.py …
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from weft.accelerate.in_place import stand_in

_USAGE = "python -m weft.accelerate [-m] script.py [its arguments]"


def main(arguments: list[str]) -> None:
    """Run the script, or with `-m` the module, that stands first; what follows is its own."""
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program or program[0].startswith("-"):
        sys.exit(f"usage: {_USAGE}")
    if not is_module and not Path(program[0]).is_file():
        sys.exit(f"{program[0]}: there is no script of this name.")
    stand_in()
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
