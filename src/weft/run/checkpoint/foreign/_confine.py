"""Takes rights away from the process that reads a stranger's file: sockets, other programs, memory."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

_ERRNO, _ALLOW, _KILL = 0x00050000, 0x7FFF0000, 0x80000000
_EPERM = 1
_SET_NO_NEW_PRIVILEGES = 38
_MODE_FILTER, _ALL_THREADS = 1, 1

# Numbers of system calls: seccomp itself, and those that are refused (socket, connect, bind, sendto, sendmsg, execve,
# execveat, ptrace, fork, vfork, io_uring_setup, which could open sockets by itself).
_CALLS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 317, (41, 42, 49, 44, 46, 59, 322, 101, 57, 58, 425)),
    "aarch64": (0xC00000B7, 277, (198, 203, 200, 206, 211, 221, 281, 117, 425)),
}
"""Machine → its mark in a filter, the number of seccomp, and the numbers that are refused."""


def confine_memory(num_bytes: int, seconds: int) -> None:
    """Let this process take so many bytes more than it has, and so many seconds of a processor; no dump is written."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def confine_calls() -> bool:
    """Refuse this process, in all of its threads, sockets and the start of programs.  Return whether the system can."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _CALLS:
        return False
    mark, seccomp, refused = _CALLS[machine]
    program = ctypes.create_string_buffer(_filter(mark, refused))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program.raw[:-1]) // 8, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return libc.syscall(seccomp, _MODE_FILTER, _ALL_THREADS, ctypes.byref(header)) == 0


def _filter(mark: int, refused: tuple[int, ...]) -> bytes:
    """A program for the kernel's filter: calls of another machine's kind kill, those listed fail with EPERM."""
    steps = [
        (0x20, 0, 0, 4),  # load the mark of the machine
        (0x15, 1, 0, mark),
        (0x06, 0, 0, _KILL),
        (0x20, 0, 0, 0),  # load the number of the call
        *((0x15, len(refused) - index, 0, number) for index, number in enumerate(refused)),
        (0x06, 0, 0, _ALLOW),
        (0x06, 0, 0, _ERRNO | _EPERM),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
