"""Where a rank stands among the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError

WORD_VARIABLE = "WEFT_SUPERVISOR"
"""What `weft launch` sets beside the standard variables: the rank's `Place.word`."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place, given to it by whoever started it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host."""
    store: str | None = None
    """File at which the ranks of this host meet; None: at MASTER_ADDR and MASTER_PORT, as torchrun arranges it."""
    word: str | None = None
    """FIFO in which the supervisor says which rank has failed; None: nobody would say so."""

    def name_run_folder(self, run: Path) -> None:
        """Tell the launcher, where there is one, which folder the run's is: what only it learns, such as a rank that
        was killed, goes there, too.  Call on one rank."""
        if self.word is None:
            return
        note = run_folder_note(Path(self.word).parent)
        with suppress(OSError):  # the launcher is gone
            aside = note.with_suffix(".tmp")
            aside.write_text(str(run.resolve()))
            os.replace(aside, note)


def run_folder_note(folder: Path) -> Path:
    """Where in a job's private folder ranks say which folder their run's is."""
    return folder / "run-folder"


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Read the place that torchrun, or `weft launch`, gave to a script; None under plain Python.

    Raises:
        LaunchError: only some of the variables are set, or one of them is no number.
    """
    given = [name for name in _VARIABLES if environment.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = [name for name in _VARIABLES if name not in given and name != "LOCAL_RANK"]
    if missing:
        raise LaunchError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but {' and '.join(missing)} not, so the "
            f"ranks cannot find each other. Start the script with `weft launch -n N` or torchrun, or unset them all."
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK = {rank} is not below WORLD_SIZE = {world_size}. Ranks count from 0.")
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in given else rank
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else world_size
    return Place(rank, world_size, local_rank, local_size, word=environment.get(WORD_VARIABLE))


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise LaunchError(f"{name} = {value!r} in the environment is no number. Give a whole number from 0.")
    return int(value)
