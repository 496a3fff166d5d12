"""Windows of steps that ranks profile: how one is asked for, and where its traces lie.

A request is one file in the run's folder, which only its user can enter.  Ranks look for it between steps; on other
hosts they see it by the file system that the run's folder is on.
"""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.events._folder import RunFolder
from weft.files import write_whole

MOST_STEPS = 100
"""Longest window: a trace of one step has some megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Ranks that are to profile some steps."""

    ranks: tuple[int, ...]
    after_step: int
    """Number of finished steps after which they begin; a rank that is further begins at once."""
    num_steps: int
    number: int = 0
    """Number of the window in its run, from 1; `ask` sets it."""

    def ask(self, run: RunFolder) -> ProfileRequest:
        """Ask the ranks of a run, and return the request with its number.

        Raises:
            OSError: the run's folder cannot be written to.
        """
        folder = run.profiles
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in itertools.count(1):
            with suppress(FileExistsError):
                (folder / str(number)).mkdir(mode=0o700)
                asked = replace(self, number=number)
                write_whole(run.profile_request, json.dumps(asdict(asked)))
                return asked  # of two who ask at once, ranks may see one alone: the other hears that nothing came
        raise AssertionError("unreachable: the count has no end")

    @classmethod
    def newest(cls, run: RunFolder) -> ProfileRequest | None:
        """Return what was asked for last; None where nothing was, or what is there is no request."""
        try:
            values = json.loads(run.profile_request.read_text())
            ranks = tuple(int(rank) for rank in values["ranks"])
            numbers = {name: int(values[name]) for name in ("after_step", "num_steps", "number")}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        asked = cls(ranks=ranks, **numbers)
        return asked if 1 <= asked.num_steps <= MOST_STEPS and asked.number > 0 else None


def window_folder(run: RunFolder, number: int) -> Path:
    """Return the folder of a window's traces."""
    return run.profiles / str(number)


def trace_path(window: Path, rank: int) -> Path:
    """Return the file of a rank's trace, as Chrome and Perfetto read it."""
    return window / f"rank-{rank}.trace.json"


def facts_path(window: Path, rank: int) -> Path:
    """Return the file that says what a rank's trace is of; it appears when the trace is whole."""
    return window / f"rank-{rank}.json"
