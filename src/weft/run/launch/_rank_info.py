"""The numbers of a rank: rank, world size, local rank, and where it meets the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events.progress import ProgressBoard, ProgressRow
from weft.events.ring import RankRing, open_ring
from weft.extensions import extensions_of, load_extension
from weft.files import write_whole

FAILURE_SECONDS = 3600.0
"""Mean time between failures that a run assumes at its beginning."""
HAND_OVER = signal.SIGUSR1
"""Signal of the supervisor: stop after this step, so that the next generation of ranks goes on, maybe under another
plan."""
_PACKAGE = "weft.run.launch.launchers"
_PLACE = ("RANK", "WORLD_SIZE")
"""Variables that only a launcher sets."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The numbers of one rank, as its launcher gave them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host."""
    store: str | None = None
    """Path of the file store of this host's ranks; None: they meet at `address`."""
    failure_pipe: str | None = None
    """Path of the FIFO of failure notices; None: there is no launcher that writes any."""
    address: str | None = None
    """Address (`host:port`) at which the ranks of all hosts meet; None: they meet at `store`, or there is one rank."""
    launcher_serves: bool = False
    """Whether the launcher listens at `address`; otherwise rank 0 does."""
    device: int | None = None
    """Number of the accelerator of this host that the rank has; None: the one that its local rank counts."""

    @property
    def device_index(self) -> int:
        """Number of the accelerator of this host that the rank has, if it has one."""
        return self.local_rank if self.device is None else self.device

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankInfo | None:
        """Read what a launcher gave to a script; None under plain Python.

        Every file in `weft/run/launch/launchers` is asked by its `rank_info(environment)`, in the order of their names.

        Raises:
            LaunchError: a launcher's variables do not hang together, or the launcher is none that Weft knows.
        """
        names = extensions_of(_PACKAGE)
        for name in names:
            info: RankInfo | None = load_extension(_PACKAGE, name).rank_info(environment)
            if info is not None:
                return info
        if stray := [name for name in _PLACE if environment.get(name)]:
            raise LaunchError(
                f"{' and '.join(stray)} {'is' if len(stray) == 1 else 'are'} set, but by no launcher that Weft knows"
                f" ({', '.join(names) or 'it has none'}). Start the script with one of these, or unset them."
            )
        return None

    def progress_row(self) -> ProgressRow | None:
        """Return the board on which this rank writes its progress for its launcher; None without a launcher."""
        if self.failure_pipe is None:
            return None
        try:
            return ProgressBoard.open(progress_path(Path(self.failure_pipe).parent)).row(self.local_rank)
        except OSError:  # the launcher is gone
            return None

    def open_ring(self, warn: Callable[[str], object]) -> RankRing | None:
        """Return the ring in which this rank records what it does; None where its launcher collects nothing.  It is
        made anew: call it once in a process."""
        if self.failure_pipe is None:
            return None
        try:
            rings = rings_note(Path(self.failure_pipe).parent).read_text()
        except OSError:
            return None
        return open_ring(Path(rings), self.rank, warn)

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


def rings_note(folder: Path) -> Path:
    """Return the file in a job's private folder that names the folder for rings of this generation's ranks."""
    return folder / "rings"


def job_note(rings: Path) -> Path:
    """Return the file beside a generation's rings that names the job's private folder, where its ranks write their
    stacks."""
    return rings / "job"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file in a job's private folder into which a rank writes its stacks when it is asked for them."""
    return folder / f"stacks{rank}"


def run_folder_note(folder: Path) -> Path:
    """Return the file in a job's private folder in which ranks name the folder of their run."""
    return folder / "run-folder"
