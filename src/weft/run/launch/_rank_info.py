"""The numbers of a rank: rank, world size, local rank, and where it meets the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events.progress import ProgressBoard, ProgressRow
from weft.files import write_whole

FAILURE_PIPE_VARIABLE = "WEFT_SUPERVISOR"
"""Environment variable that `weft launch` sets beside the standard ones: the rank's `RankInfo.failure_pipe`."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The numbers of one rank, as its launcher gave them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host."""
    store: str | None = None
    """Path of the file store of this host's ranks; None: they meet at MASTER_ADDR and MASTER_PORT, as torchrun's do."""
    failure_pipe: str | None = None
    """Path of the FIFO of failure notices; None: there is no launcher that writes any."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankInfo | None:
        """Read what torchrun, or `weft launch`, gave to a script; None under plain Python.

        Raises:
            LaunchError: only some of the variables are set, or one of them is no number.
        """
        set_variables = [name for name in _VARIABLES if environment.get(name)]
        if "RANK" not in set_variables and "WORLD_SIZE" not in set_variables:
            return None
        missing = [name for name in _VARIABLES if name not in set_variables and name != "LOCAL_RANK"]
        if missing:
            raise LaunchError(
                f"{' and '.join(set_variables)} {'is' if len(set_variables) == 1 else 'are'} set, but"
                f" {' and '.join(missing)} not, so the ranks cannot find each other. Start the script with"
                " `weft launch -n N` or torchrun, or unset them all."
            )
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise LaunchError(f"RANK = {rank} is not below WORLD_SIZE = {world_size}. Ranks count from 0.")
        local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in set_variables else rank
        local_size = _number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else world_size
        return cls(rank, world_size, local_rank, local_size, failure_pipe=environment.get(FAILURE_PIPE_VARIABLE))

    def progress_row(self) -> ProgressRow | None:
        """Where this rank writes how far it has come, for its launcher to read; None where there is no launcher."""
        if self.failure_pipe is None:
            return None
        try:
            return ProgressBoard.open(progress_path(Path(self.failure_pipe).parent)).row(self.local_rank)
        except OSError:  # the launcher is gone
            return None

    def report_run_folder(self, run: Path) -> None:
        """Tell the launcher, if there is one, the folder of the run.  Call on one rank.

        The launcher writes there what only it learns, such as the kill of a rank.
        """
        if self.failure_pipe is None:
            return
        note = run_folder_note(Path(self.failure_pipe).parent)
        with suppress(OSError):  # the launcher is gone
            write_whole(note, str(run.resolve()))


def progress_path(folder: Path) -> Path:
    """Return the file in a job's private folder in which ranks write how far they have come."""
    return folder / "progress"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file in a job's private folder into which a rank writes its stacks when it is asked for them."""
    return folder / f"stacks{rank}"


def run_folder_note(folder: Path) -> Path:
    """Return the file in a job's private folder in which ranks name the folder of their run."""
    return folder / "run-folder"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise LaunchError(f"{name} = {value!r} in the environment is no number. Give a whole number from 0.")
    return int(value)
