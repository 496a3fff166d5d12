"""Facts of processes on this machine, and how processes end together. Where the system has none (no /proc), nothing is
known, and Weft goes by its timeouts.

Where it says nothing (no /proc), nothing is known, and Weft goes by its timeouts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

_SET_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_EXITING = 0x4


def state_of(pid: int) -> str:
    """The letter that the kernel gives to a process's state (`R`, `S`, `T` …); empty where there is no such process."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses: fields are counted from the last one.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_ending(pid: int) -> bool:
    """Whether a process has been killed or has exited, though it may still hold files: a large one takes seconds."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state in ("Z", "X") or bool(int(numbers[5]) & _EXITING)


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP holds the process.  One that a debugger holds is in good hands and not meant."""
    return state_of(pid) == "T"


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that have not been waited for."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended, or this kernel does not say
        return []


def die_with(parent: int) -> None:
    """Let this process be killed when its parent ends, in whatever way, even while it is stopped itself.

    The kernel means the thread that started this process: start it from one that lives as long as it is needed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def machine_name() -> str:
    """Host, boot of its kernel, and the space that its process ids are counted in (a container has its own), with `/`
    between them; what the system does not say is left out."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def start_of(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks: with its id this names it.  `unknown` where the
    system does not say; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "unknown"
    return "unknown"


def cpu_seconds_of(pid: int) -> float:
    """Processor time that a process of this machine has used, in user and kernel mode; 0 where it is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def unused_memory_bytes() -> int:
    """Return the memory that processes of this host, and of this process's control group, can still get without
    swapping; 0 where the system does not say."""
    lines = _lines(Path("/proc/meminfo"))
    left = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, group = line.split(":", 2)
        names = _CGROUP_MEMORY.get(controllers)
        if names is not None:
            folder = Path("/sys/fs/cgroup", controllers, group.lstrip("/"))
            limit, usage = (next(iter(_lines(folder / name)), "") for name in names)
            if limit.isdecimal() and usage.isdecimal():
                left.append(max(0, int(limit) - int(usage)))
    return min(left, default=0)


_CGROUP_MEMORY = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Controllers of a control group (none in version 2) → its files of limit and usage."""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
