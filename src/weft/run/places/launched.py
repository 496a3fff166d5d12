"""Agents that one launcher has started: how they do, by what they note in the run's folder.

A launcher's own status may be the first, the highest or a signal's, and when a machine is gone it may not end at all.
"""

from __future__ import annotations

import time
from pathlib import Path

from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND
from weft.run.places.submission import AgentNote, forget_attempts

_BEGIN_SECONDS = 60.0
"""Time for agents to begin: machines answered a moment ago."""
_END_SECONDS = 20.0
"""Time for the others after one agent has ended: all hear of the end at once."""
_LOOK_SECONDS = 1.0


class LaunchedAgents:
    """The agents of one launcher."""

    def __init__(self, run: Path, number: int, lost: int) -> None:
        """`lost`: status of a launcher that is to be started again, since a machine was lost."""
        self._run, self._number, self._lost = run, number, lost
        self._began = self._looked = 0.0
        self._ended: float | None = None
        """When an agent was first seen to have ended."""
        self._have_ever_begun = self._have_begun = False
        self.have_all_begun = False
        """Whether all agents of the launcher that runs have begun."""

    def begin(self) -> None:
        """Call before the launcher starts."""
        forget_attempts(self._run)
        self._began, self._ended = time.monotonic(), None
        self._have_begun = self.have_all_begun = False

    @property
    def is_stuck(self) -> bool:
        """Whether the launcher waits for machines that do not answer."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
        if self._ended is not None:
            return now - self._ended > _END_SECONDS
        return not self._have_begun and now - self._began > _BEGIN_SECONDS

    def status(self, launcher: int, *, were_told: bool) -> int:
        """Return how the agents have ended, as one agent's status.

        Args:
            launcher: status of the launcher itself.
            were_told: whether the agents had been told to save and leave.
        """
        notes = self._look()
        statuses = {note.status for note in notes}
        if not self._have_ever_begun:
            return launcher or 1  # nothing says that the machines, and not the command, are to blame
        for status in (AGENT_DONE, AGENT_MEND, 1):
            if status in statuses:
                return status
        # A machine that was lost takes its agent's last word with it.  Agents that leave untold, to go on later, do so
        # since others are missing, which may be back when all are started again.
        is_lost = not were_told or None in statuses or len(notes) < self._number
        return self._lost if is_lost else AGENT_LATER

    def _look(self) -> list[AgentNote]:
        notes = AgentNote.all_of(self._run)
        self._have_begun, self.have_all_begun = bool(notes), len(notes) >= self._number
        self._have_ever_begun |= self._have_begun
        if self._ended is None and any(note.status is not None for note in notes):
            self._ended = time.monotonic()
        return notes
