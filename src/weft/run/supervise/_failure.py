"""Judges the kind of failure that ended a generation of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.run.launch._report import is_secondary_or_timeout
from weft.run.launch.job_end import HANG, HOST_LOST, PARENT_LOST, JobEnd

FailureKind = Literal["killed", "error", "hang", "host_memory", "device_memory", "not_finite", "replicas", "input"]
"""The policies of `[run.on_failure]`, and `input`: what only the user can mend."""

_NOTICED = (HANG, HOST_LOST, PARENT_LOST)
"""What no rank has raised: the message says everything."""
_NO_HOST_MEMORY = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "unable to mmap")
"""Texts of torch's allocators and of the system on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFailure:
    """The failure of a generation of ranks: its first cause, and not the errors that this made in other ranks."""

    kind: FailureKind
    rank: int
    host: str
    cause: str
    """One line: the error's class and first line, or how the rank died."""
    step: int
    """Step that the rank was in, counted from 1; 0 where its loop had not begun."""
    phase: str
    """Phase of that step; empty between phases."""
    made_steps: bool = True
    """Whether the generation had finished a step before."""

    def is_again(self, earlier: GenerationFailure | None) -> bool:
        """Whether an earlier generation failed in the same way at the same step."""
        return earlier is not None and (self.kind, self.step, self.cause) == (earlier.kind, earlier.step, earlier.cause)


def failure_of(end: JobEnd, *, out_of_memory_kills: int) -> GenerationFailure | None:
    """Judge how a job ended; None where it ended well.

    Args:
        out_of_memory_kills: processes that the kernel killed on this host, while the job ran, because memory was short
            (`kernel_memory_kills` after minus before).
    """
    cause = end.cause
    if cause is None:
        return None
    position = end.positions.get(cause.rank)
    raised = cause.error not in (None, *_NOTICED) and not cause.message.startswith("killed by")
    first_line = next(iter(cause.message.strip().splitlines()), "")
    return GenerationFailure(
        kind=_kind(end, out_of_memory_kills),
        rank=cause.rank,
        host=cause.host,
        cause=f"{cause.error}: {first_line}" if raised else first_line,
        step=position.step + 1 if position is not None and position.has_begun else 0,
        phase=position.phase if position is not None else "",
        made_steps=made_steps(end),
    )


def made_steps(end: JobEnd) -> bool:
    """Whether a generation has finished a step."""
    return any(position.step > position.first_step for position in end.positions.values())


def _kind(end: JobEnd, out_of_memory_kills: int) -> FailureKind:
    cause = end.cause
    assert cause is not None
    error = cause.error or ""
    if error in (HANG, "SIGSTOP"):
        return "hang"
    if error == "OutOfMemoryError":
        return "device_memory"
    if error == "MemoryError" or any(text in cause.message for text in _NO_HOST_MEMORY):
        return "host_memory"
    if error == HOST_LOST:
        return "killed"
    if error.startswith("SIG") or error == PARENT_LOST:
        return "host_memory" if error in ("SIGKILL", PARENT_LOST) and out_of_memory_kills else "killed"
    if error == "NotFiniteError":
        return "not_finite"
    if error == "ReplicaError":
        return "replicas"
    if cause.is_weft_error:
        if is_secondary_or_timeout(cause):
            return "hang"  # the others waited for a rank until their timeout
        return "input" if cause.weft_status == 2 else "error"
    return "error"


def kernel_memory_kills() -> int:
    """Return how many processes the kernel has killed since the host started because memory was short, in any control
    group; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
