"""What the supervisor of a script tells the session of each generation, and what that session tells it.

Both are JSON files in the private folder of the generation's job, like the board of progress: no setting travels by the
environment.  `generation.json` is there before the ranks start; rank 0's session writes `session.json`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from weft.files import write_whole
from weft.run.launch._rank_info import FAILURE_SECONDS, RankInfo

_GENERATION, _SESSION = "generation.json", "session.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptGeneration:
    """One start of all ranks of a script under `weft launch`, on one host or on several."""

    number: int = 1
    """Counted from 1 for the first start."""
    run: str = ""
    """Folder of the run that the session goes on with, from its newest save; empty: it begins its own."""
    plan: str = ""
    """TOML of the plan that the session is under, whatever the script says; empty: as the script says."""
    before: str = ""
    """TOML of the plan of the generation before, where that was another."""
    failure_seconds: float = FAILURE_SECONDS
    """Mean time between failures so far, in seconds."""
    memory: str = ""
    """The supervisor's folder in memory for saves; empty: they go to the disk."""
    folder: str = ""
    """Folder in which the session begins its run, whatever the script says; empty: as the script says."""
    faults: dict[str, Any] | None = None
    """What `weft chaos` injects into the ranks; None: nothing."""
    owner: dict[str, Any] | None = None
    """Token of the run's folder (`FolderToken`), where ranks have several hosts: the one that leads owns it.  None:
    rank 0 takes the folder itself."""

    def write(self, folder: Path) -> None:
        """Write it into the job's private folder.  Call it before the ranks start."""
        (folder / _GENERATION).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, rank_info: RankInfo | None) -> Self | None:
        """Return the generation that this rank is of; None: no supervisor has started it."""
        if rank_info is None or rank_info.failure_pipe is None:
            return None
        with suppress(OSError):
            return cls(**json.loads((Path(rank_info.failure_pipe).parent / _GENERATION).read_text()))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """What a supervisor must know of the session in its ranks."""

    num_models: int = 0
    """Models that were prepared.  Ranks can go on where one was, with a loss."""
    has_saved: bool = False
    """Whether the newest save in the run's folder is of this run."""
    batch_size: int = 0
    """Samples of the global batch."""
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    """The session's facts as a recipe, as `weft.config.document.plain` writes it."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The model's `ModelFacts`, likewise."""

    def write(self, rank_info: RankInfo) -> None:
        """Tell the launcher.  Call it on rank 0."""
        assert rank_info.failure_pipe is not None
        with suppress(OSError):  # the launcher is gone
            write_whole(Path(rank_info.failure_pipe).parent / _SESSION, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the session of a job has told; before it has, that there is nothing."""
        with suppress(OSError):
            return cls(**json.loads((folder / _SESSION).read_text()))
        return cls()
