"""Stands for `weft agent` where only its seat matters: notes the one that Slurm has given it, without torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from weft.run.places import place_of


def tell(run: Path) -> None:
    seat = place_of("slurm").seat(os.environ)
    assert seat is not None
    (run / f"seat-{seat.index}.json").write_text(json.dumps(asdict(seat)))


if __name__ == "__main__" and "--settle" not in sys.argv:
    tell(Path(sys.argv[2]))
