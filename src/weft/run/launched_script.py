"""A script as it is to be started: on this host, or this host's ranks of it where it has several."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events import RunFolder
from weft.events.folder_lock import FolderLock
from weft.run.hosts.crew import HostCrew, HostRanks
from weft.run.launch.generation import ScriptGeneration
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import run_script
from weft.run.supervise import SupervisorSignals

SCRIPT_FUNCTION = "script"
"""All that the leader of several hosts can ask the others for: ranks of the script that they were started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedScript:
    """A script and how it is to be started."""

    script: str
    """Python file; with `module`, the name of a module."""
    arguments: Sequence[str]
    """Its own command line."""
    num_processes: int
    module: bool = False
    under: str | None = None
    """Module that runs it, as in `python -m under script`."""
    threads: int | None = None
    """Threads of each rank; by default the cores are shared out."""
    logs: Path | None = None
    """Folder for what each rank prints."""

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise LaunchError(f"num_processes = {self.num_processes}: a job has at least 1 process.")

    @property
    def uses_weft(self) -> bool:
        """Whether its text imports Weft, so that ranks are better forked from a process that has."""
        if self.under is not None:
            return True
        with suppress(OSError, UnicodeDecodeError):
            return (
                not self.module
                and re.search(r"^\s*(import|from) weft\b", Path(self.script).read_text(), re.M) is not None
            )
        return False

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that its ranks get by fork."""
        return ("weft.api", "torch._dynamo") if self.uses_weft else ()


@dataclass(slots=True, kw_only=True)
class HostsOfScript:
    """The hosts of a script that has several, as the one that leads uses them."""

    crew: HostCrew
    run: RunFolder
    """Folder of the session's run, whatever the script says: all hosts see it."""
    lock: FolderLock
    """Makes this host the owner of that folder.  Every generation gets a token of its own."""
    wait_seconds: float
    """Time to wait for others, where too few are left."""
    signals: SupervisorSignals
    """Handlers of signals, which this host has set before it led."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """How a script ended that is started no more."""

    status: int
    text: str = ""
    """What there is to say of it."""
    has_failed: bool = False


def start_script(
    launched: LaunchedScript,
    ranks: HostRanks,
    *,
    prepare: Callable[[Path], object] | None = None,
    conclude: Callable[[], object] = lambda: None,
    starts_again: Callable[[], bool] | None = None,
) -> JobEnd:
    """Run a host's ranks of a script to their end.  The leader says which generation it is, and nothing of the script:
    each host has its own order.  The other arguments are as of `run_script`.

    Raises:
        LaunchError: the leader asks for something else than a script, or no ranks could be started.
    """
    roster = ranks.roster
    if roster.function != SCRIPT_FUNCTION:
        raise LaunchError(f"the leader asks this host to call {roster.function!r}, and it was started with a script.")
    generation = ScriptGeneration(**ranks.arguments)
    return run_script(
        launched.script,
        launched.arguments,
        ranks.seat.num_ranks,
        module=launched.module,
        under=launched.under,
        threads_per_rank=launched.threads,
        logs=launched.logs,
        preload=launched.preload,
        num_restarts=generation.number - 1,
        fork_server=ranks.fork_server,
        stopped_timeout_seconds=roster.stopped_timeout_seconds,
        hang_limits=ranks.hang_limits,
        signal_to_send=ranks.signal_to_send,
        prepare=prepare or generation.write,
        conclude=conclude,
        starts_again=starts_again or (lambda: bool(generation.run)),
        part=ranks.part,
        is_over_elsewhere=ranks.is_over_elsewhere,
        rings=ranks.rings,
    )
