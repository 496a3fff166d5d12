"""Which rank failed first, told in a few lines."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from weft.launch._echoes import is_echo
from weft.launch._job import RankOutcome

MAX_LINES = 15
_MAX_WIDTH = 300
_LATE = ("timed out", "Timed out", "timeout", "Timeout")
"""What torch says on a rank that has waited in vain."""


def first_cause(
    codes: Mapping[int, int], ended_at: Mapping[int, float], outcomes: Mapping[int, RankOutcome | None]
) -> RankOutcome | None:
    """Return how the rank ended that failed first, or None when all ended well.

    A rank that only lost a peer is passed over when there is another; so is one that the launcher ended by SIGTERM.
    """
    failed = [_ended(rank, code, ended_at[rank], outcomes.get(rank)) for rank, code in codes.items() if code != 0]
    return min(failed, key=lambda outcome: (_is_echo(outcome), outcome.when), default=None)


def report(cause: RankOutcome, world_size: int, logs: Path | None) -> str:
    """Tell the cause in at most 15 lines: the rank, its host, the error, and where it was raised."""
    raised = cause.error is not None and not cause.message.startswith(("killed by", "exit status"))
    kind = f"{cause.error}: " if raised else ""
    message = cause.message.strip().splitlines() or [""]
    head = [f"rank {cause.rank} of {world_size} on host {cause.host} stopped: {kind}{message[0]}", *message[1:]]
    foot = [f"The rest of what it printed: {logs / f'rank{cause.rank}.out'}"] if logs is not None else []
    trace = cause.trace[-(MAX_LINES - len(foot) - min(len(head), 6)) :]
    if len(head) > (room := MAX_LINES - len(foot) - len(trace)):
        head = [*head[: room - 1], "…"]
    lines = [line if len(line) <= _MAX_WIDTH else line[: _MAX_WIDTH - 1] + "…" for line in [*head, *trace, *foot]]
    return "\n".join(lines)


def _ended(rank: int, code: int, when: float, outcome: RankOutcome | None) -> RankOutcome:
    """What a failed rank said itself, or what its exit code says of it."""
    if outcome is not None and outcome.error is not None:
        return outcome
    if code > 0:
        how = "without an error" if outcome is None else "while it was closing down"
        text = f"exit code {code} {how}"
        return RankOutcome(rank=rank, host=socket.gethostname(), when=when, message=text, status=code)
    name = signal.Signals(-code).name
    text = f"killed by {name}"
    if -code == signal.SIGKILL:
        text += ". When nobody did that, the machine ran out of memory: see `dmesg`."
    return RankOutcome(rank=rank, host=socket.gethostname(), when=when, error=name, message=text, status=128 - code)


def _is_echo(outcome: RankOutcome) -> bool:
    return outcome.error == "SIGTERM" or is_echo(outcome.message)


def is_late(outcome: RankOutcome) -> bool:
    """Whether an error says no more than that another rank did not come in time, or is gone."""
    return _is_echo(outcome) or outcome.error == "CollectiveError" or any(word in outcome.message for word in _LATE)
