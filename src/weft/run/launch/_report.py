"""Finds the rank that failed first, and reports its failure in a few lines."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import weft.errors
from weft.run.launch._job import RankExit
from weft.run.launch._secondary_errors import is_secondary_error

MAX_LINES = 15
_MAX_WIDTH = 300
"""Letters of a line of the trace."""
_MOST_LETTERS = 2_000
"""Letters of a line of an error that is not Weft's."""
_TIMEOUT_TEXTS = ("timed out", "Timed out", "timeout", "Timeout")
"""Texts in errors of torch on a rank that has waited in vain."""
_MISSING = re.compile(r"timed out: .* s: rank (\d+) has not come")
"""Text of Weft's collectives where they have waited for one rank in vain."""


def first_cause(
    codes: Mapping[int, int], ended_at: Mapping[int, float], outcomes: Mapping[int, RankExit | None]
) -> RankExit | None:
    """Return how the rank ended that failed first, or None when all ended well.

    A rank that only lost a peer is passed over when there is another; so is one that the launcher ended by SIGTERM.
    """
    # Clocks of one host are compared, so the earliest end is the first cause; but a rank that lost a peer may end
    # before the peer is reaped, so such secondary errors sort behind all others.
    failed = [_ended(rank, code, ended_at[rank], outcomes.get(rank)) for rank, code in codes.items() if code != 0]
    return min(failed, key=lambda outcome: (_is_secondary(outcome), outcome.when), default=None)


def report(cause: RankExit, world_size: int, logs: Path | None) -> str:
    """Tell the cause: the rank, its host, the error, and where it was raised.  In at most 15 lines, unless an error of
    Weft's has more."""
    raised = cause.error is not None and not cause.message.startswith(("killed by", "exit status"))
    kind = f"{cause.error}: " if raised else ""
    message = cause.message.strip().splitlines() or [""]
    head = [f"rank {cause.rank} of {world_size} on host {cause.host} stopped: {kind}{message[0]}", *message[1:]]
    foot = [f"The rest of what it printed: {logs / f'rank{cause.rank}.out'}"] if logs is not None else []
    trace = cause.trace[-(MAX_LINES - len(foot) - min(len(head), 6)) :]
    if len(head) > (room := MAX_LINES - len(foot) - len(trace)) and not _is_own(cause):
        head = [*head[: room - 2], "…", head[-1]]
    trace = [line if len(line) <= _MAX_WIDTH else line[: _MAX_WIDTH - 1] + "…" for line in trace]
    return "\n".join([*(head if _is_own(cause) else map(_shortened, head)), *trace, *foot])


def _is_own(cause: RankExit) -> bool:
    """Whether the error is one of Weft's: each is as long as it must be, and ends with what to do."""
    kind = getattr(weft.errors, cause.error or "", None)
    return isinstance(kind, type) and issubclass(kind, weft.errors.WeftError)


def _shortened(line: str) -> str:
    """A line of another's error; what to do stands at the end of most, so a long one is cut in its middle."""
    half = _MOST_LETTERS // 2
    return line if len(line) <= _MOST_LETTERS else f"{line[:half]} … {line[-half:]}"


def _ended(rank: int, code: int, when: float, outcome: RankExit | None) -> RankExit:
    """Return the exit that a failed rank reported, or one that is made from its exit code."""
    if outcome is not None and outcome.error is not None:
        return outcome
    if code > 0:
        how = "without an error" if outcome is None else "while it was closing down"
        text = f"exit code {code} {how}"
        return RankExit(rank=rank, host=socket.gethostname(), when=when, message=text, status=code)
    name = signal.Signals(-code).name
    text = f"killed by {name}"
    if -code == signal.SIGKILL:
        text += ". When nobody did that, the machine ran out of memory: see `dmesg`."
    return RankExit(rank=rank, host=socket.gethostname(), when=when, error=name, message=text, status=128 - code)


def _is_secondary(outcome: RankExit) -> bool:
    return outcome.error == "SIGTERM" or is_secondary_error(outcome.message)


def is_timeout(outcome: RankExit) -> bool:
    """Whether a collective of a rank has timed out, since another rank did not come."""
    return outcome.error is not None and any(text in outcome.message for text in _TIMEOUT_TEXTS)


def missing_rank(cause: RankExit, outcomes: Mapping[int, RankExit | None]) -> int | None:
    """Return the rank that a collective has waited for in vain, and which has not itself waited for another; None where
    the error does not name one."""
    rank, seen = cause.rank, set[int]()
    outcome: RankExit | None = cause
    while outcome is not None and rank not in seen and (named := _MISSING.search(outcome.message)) is not None:
        seen.add(rank)
        rank = int(named[1])
        outcome = outcomes.get(rank)
    return None if rank in seen or rank == cause.rank else rank


def is_secondary_or_timeout(outcome: RankExit) -> bool:
    """Whether an error says no more than that another rank did not come in time, or is gone."""
    if _is_secondary(outcome) or outcome.error == "CollectiveError":
        return True
    return any(text in outcome.message for text in _TIMEOUT_TEXTS)
