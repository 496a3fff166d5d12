"""How one attempt of a job ended, and whether its place is to start it again."""

from __future__ import annotations

import json
from pathlib import Path

from weft.files import write_whole
from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND
from weft.run.places.submission import ATTEMPTS, FOLDER, AgentNote, is_to_stop, newest_step

_MOST_WITHOUT_STEPS = 3
"""Attempts in a row without a new step, after which the job is not started again: a fault in the run would repeat."""


def settle(run: Path) -> int:
    """Say how the attempt of a job that has just ended did: call once, where all its agents have ended.

    Returns:
        `AGENT_DONE`, also where the user has stopped it; `AGENT_LATER`: start it again; `AGENT_MEND`: its user must
        mend something; 1: it has failed, and without progress.
    """
    notes = AgentNote.all_of(run)
    newest = max((note.attempt for note in notes), default=0)
    statuses = {note.status for note in notes if note.attempt == newest}
    step = newest_step(run) or 0
    before = _attempts(run)
    write_whole(run / FOLDER / ATTEMPTS, json.dumps([*before, step]))
    if AGENT_DONE in statuses:
        return AGENT_DONE
    if is_to_stop(run):
        print("stopped, as asked: the same command that submitted the run lets it go on", flush=True)
        return AGENT_DONE
    if step > (before[-1] if before else 0):
        return AGENT_LATER
    if AGENT_MEND in statuses and AGENT_LATER not in statuses:
        return AGENT_MEND
    reached = [0, *before]  # the first attempt begins at step 0
    in_vain = len(reached) - reached.index(step)
    if in_vain < _MOST_WITHOUT_STEPS:
        return AGENT_LATER
    print(f"the run has made no step in {in_vain} attempts, so it is not started again", flush=True)
    return 1


def why_ended(run: Path) -> str:
    """Say how a job ended, by what its agents have noted: the first cause, with its machine."""
    notes = AgentNote.all_of(run)
    newest = max((note.attempt for note in notes), default=0)
    mine = [note for note in notes if note.attempt == newest]
    if any(note.status == AGENT_DONE for note in mine):
        return "done"
    for status in (AGENT_MEND, 1, AGENT_LATER):
        for note in mine:
            if note.status == status:
                return f"host {note.host}: {note.text.splitlines()[0] if note.text else status}"
    return "agents ended without a word" if mine else "no agent has started"


def _attempts(run: Path) -> list[int]:
    """The newest step at the end of each attempt before."""
    try:
        return [int(each) for each in json.loads((run / FOLDER / ATTEMPTS).read_text())]
    except (OSError, ValueError, TypeError):
        return []
