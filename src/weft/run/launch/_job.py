"""The job that a launcher gives to its fork server, and the exits of its ranks: JSON files in a private folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """The part of a job on several hosts that one host has."""

    first_rank: int
    """Its ranks are this one and those that follow."""
    world_size: int
    """Ranks of all hosts."""
    store: str
    """Address (`host:port`) of the store at which the ranks of all hosts meet."""
    number: int = 0
    """Place of the host among those that have ranks."""
    num_hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """One launch."""

    kind: Literal["function", "script", "module", "cells"]
    target: str
    """`package.module:function`, the path of a script, the name of a module, or of a function of the cells."""
    arguments: dict[str, Any] | list[str]
    """Keyword arguments of the function, the script's command line, or `arguments` and `sources` of cells."""
    num_processes: int
    """Ranks on this host."""
    threads_per_rank: int
    threads_given: bool
    """The environment says how many, whatever `threads_per_rank` is."""
    working_folder: str
    import_path: list[str]
    preload: list[str]
    """Modules that every rank will import: the ranks' parent does it once for all."""
    logs: str | None
    """Folder of `rank<r>.out`, with what each rank prints; None: ranks print where their parent prints."""

    num_restarts: int = 0
    """How often the script was started before."""
    memory: str | None = None
    """The launcher's folder in the host's memory, which the ranks' parent removes if the launcher is killed."""
    part: HostPart | None = None
    """Where the job has other hosts, too."""

    @property
    def ranks(self) -> range:
        """The ranks on this host, by their numbers in the whole job."""
        first = self.part.first_rank if self.part is not None else 0
        return range(first, first + self.num_processes)

    def write(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> LaunchJob:
        known: dict[str, Any] = json.loads((folder / "job.json").read_text())
        part = known.pop("part")
        return cls(**known, part=None if part is None else HostPart(**part))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The exit of a rank, as the rank itself reports it."""

    rank: int
    host: str
    when: float
    """Monotonic seconds of this host."""
    value: Any = None
    error: str | None = None
    """Type of the exception that ended it."""
    message: str = ""
    trace: list[str] = dataclasses.field(default_factory=list[str])
    """The innermost calls of its traceback, outermost first."""
    is_weft_error: bool = False
    """Whether the error is one of `weft.errors`, whose message says everything."""
    weft_status: int = 2
    """The error's own `status`."""
    status: int = 0
    """Exit status."""

    def write(self, folder: Path) -> None:
        write_whole(outcome_path(folder, self.rank), json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankExit | None:
        """Return what a rank left, or None when it ended without a word."""
        try:
            return cls(**json.loads(outcome_path(folder, rank).read_text()))
        except FileNotFoundError:
            return None


def outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"
