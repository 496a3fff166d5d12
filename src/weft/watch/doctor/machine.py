"""Whether this machine can run a job well: one check per thing that a job needs.

What is measured and what is said of it are two functions each (`check_memory()` measures, `judge_memory(...)` says), so
that tests give the second the figures of machines that they do not have.  Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from weft.config.cluster import Cluster, known_machine
from weft.formatting import format_bytes, format_memory, format_number, format_seconds
from weft.process import unused_memory_bytes
from weft.version import VERSION

State = Literal["ok", "note", "change"]

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 256 << 20
"""Shared memory per rank: buffers of collectives, messages, and a share of the saves."""
_LEAST_MEMORY_BYTES = 1 << 30
"""Memory per core: a rank that has imported torch holds 0.3 GiB before it has a model."""
_LEAST_DESCRIPTORS = 1024
_LEAST_DISK_BYTES = 5 * 10**9
_SLOW_DISK = 50e6
"""Bytes per second below which saves are waited for."""
_DISK_SAMPLE = 32 << 20
_SLOW_LOOPBACK = 1e-3
_LEAST_PORTS = 1000
_TORCH = ((2, 11), (2, 14))
"""First version that Weft runs on, and the first that it does not."""
_TIME_ERROR = 5
"""What the kernel's adjtimex says of a clock that nothing keeps right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One thing that was looked at."""

    what: str
    """Its name, two words at most."""
    value: str
    """What was measured, with units."""
    state: State = "ok"
    """`ok`; `note`: good to know, and nothing is wrong; `change`: something should be changed."""
    change: str = ""
    """Why, and the change to make."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)


def wrong(what: str, value: str, change: str) -> MachineCheck:
    """Return a check of something that should be changed."""
    return MachineCheck(what=what, value=value, state="change", change=change)


def noted(what: str, value: str, change: str) -> MachineCheck:
    """Return a check of something that is good to know."""
    return MachineCheck(what=what, value=value, state="note", change=change)


def check_machine(folder: Path = Path()) -> list[MachineCheck]:
    """Look at all that a job on this machine needs; takes about a second.  Called by `weft doctor`.

    Args:
        folder: where runs are going to lie; the speed of its disk is measured.
    """
    machine = Cluster.detect()
    checks: tuple[Callable[[], MachineCheck], ...] = (
        _versions, _engine,
        lambda: _cores(machine), lambda: _memory(machine), lambda: _shared_memory(machine), lambda: _devices(machine),
        lambda: _measured(machine),
        _loopback, _ports, _descriptors, _clock, _clock_set,
        lambda: _disk("disk of runs", folder), lambda: _disk("temp folder", Path(tempfile.gettempdir())),
    )  # fmt: skip
    return [check() for check in checks]


# ── software ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _versions() -> MachineCheck:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return judge_versions(VERSION, torch, platform.python_version())


def judge_versions(weft: str, torch: str, python: str) -> MachineCheck:
    """Judge the versions of Weft, torch (empty: not installed) and Python."""
    low, high = (".".join(map(str, bound)) for bound in _TORCH)
    value = f"weft {weft}, torch {torch or 'not installed'}, Python {python}"
    fits = torch and _TORCH[0] <= tuple(map(int, torch.split("+")[0].split(".")[:2])) < _TORCH[1]
    if not fits:
        return wrong(
            "versions", value, f'Weft runs on torch {low} and newer, below {high}: pip install "torch>={low},<{high}"'
        )
    return MachineCheck(what="versions", value=value)


def _engine() -> MachineCheck:
    found = find_spec("weft.comm")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return judge_engine(any((Path(folder) / "shared_memory" / "weft_shared_memory.so").is_file() for folder in folders))


def judge_engine(is_built: bool) -> MachineCheck:
    """Judge whether the engine of the backend `weft` was compiled at installation."""
    if is_built:
        return MachineCheck(what="cpu:weft engine", value="compiled")
    return noted(
        "cpu:weft engine", "not compiled", "the first job on CPUs compiles it, for which it needs a C++ compiler (c++)"
    )


# ── processors, memory, devices ──────────────────────────────────────────────────────────────────────────────────────


def _cores(machine: Cluster) -> MachineCheck:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return judge_cores(machine.num_cores, os.cpu_count() or machine.num_cores, load, os.environ.get("OMP_NUM_THREADS"))


def judge_cores(usable: int, present: int, load: float, threads: str | None) -> MachineCheck:
    """Judge the cores that this process may use, of those present, and what runs on them (load: runnable threads in the
    mean of the last minute)."""
    limited = f" of {present}: affinity or a control group leaves out the others" if present > usable else ""
    value = f"{usable}{limited}; load {format_number(load)}"
    if load > 0.5 * usable + 0.5:
        return wrong(
            "cores",
            value,
            f"something computes on about {format_number(min(load, usable), 2)} of them now:"
            " a job that shares its cores waits for its slowest rank. Stop it, or use fewer"
            " processes.",
        )
    if threads is not None and threads.isdigit() and int(threads) > usable:
        return wrong(
            "cores",
            value,
            f"OMP_NUM_THREADS={threads} asks for more threads than there are cores."
            " Unset it: the plan says how many threads a rank has.",
        )
    return MachineCheck(what="cores", value=value)


def _memory(machine: Cluster) -> MachineCheck:
    total = sum(node.memory_bytes for node in machine.nodes)
    unused = unused_memory_bytes()
    return judge_memory(total, min(unused, total), machine.num_cores)


def judge_memory(total_bytes: int, unused_bytes: int, cores: int) -> MachineCheck:
    """Judge the memory that a job may use, and how much of it is unused now."""
    value = f"{format_memory(unused_bytes)} unused of {format_memory(total_bytes)}"
    if unused_bytes < cores * _LEAST_MEMORY_BYTES:
        ranks = unused_bytes // _LEAST_MEMORY_BYTES
        return wrong(
            "memory",
            value,
            f"one rank per core needs {format_memory(cores * _LEAST_MEMORY_BYTES)} before it has"
            f" a model. End what holds memory, or start at most {max(1, ranks)} processes.",
        )
    return MachineCheck(what="memory", value=value)


def _shared_memory(machine: Cluster) -> MachineCheck:
    if not _SHARED_MEMORY.is_dir():
        return judge_shared_memory(0, 0, machine.num_cores)
    system = os.statvfs(_SHARED_MEMORY)
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    return judge_shared_memory(size, free, machine.num_cores)


def judge_shared_memory(size_bytes: int, free_bytes: int, cores: int) -> MachineCheck:
    """Judge `/dev/shm`, through which ranks of one host exchange tensors and in which their saves lie first."""
    value = f"{format_memory(free_bytes)} free of {format_memory(size_bytes)}" if size_bytes else "none"
    wanted = cores * _LEAST_SHARED_BYTES
    if free_bytes >= wanted:
        return MachineCheck(what="shared memory", value=value)
    if size_bytes >= wanted:
        change = "something fills /dev/shm. Look with `ls -l /dev/shm`, and remove what no process uses."
    else:
        change = (
            f"a container gets 64 MiB by default. Start it with --shm-size={max(1, wanted >> 30)}g, or mount /dev/shm"
            ' larger; without it ranks speak through sockets (compute.backend = "gloo").'
        )
    return wrong("shared memory", value, change)


def _devices(machine: Cluster) -> MachineCheck:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return judge_devices(machine.num_accelerators or 0, ", ".join(machine.kinds), torch)


def judge_devices(accelerators: int, kinds: str, torch: str) -> MachineCheck:
    """Judge the accelerators that the driver shows beside the build of torch."""
    if not accelerators:
        return MachineCheck(what="devices", value="no accelerator: ranks compute on cores")
    value = f"{accelerators} × {kinds}"
    if torch.endswith("+cpu"):
        return MachineCheck(
            what="devices",
            value=value,
            state="change",
            change=f"torch {torch} is built for CPUs and uses none of them. Install the build for your"
            " driver: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    return MachineCheck(what="devices", value=value)


def _measured(machine: Cluster) -> MachineCheck:
    note = known_machine().note
    if not note:
        return MachineCheck(what="measurements", value="kept from weft probe")
    return noted("measurements", f"none of {machine.summary}", note)


# ── sockets, descriptors, clocks ─────────────────────────────────────────────────────────────────────────────────────


def _loopback() -> MachineCheck:
    try:
        return judge_loopback(_round_trip_seconds())
    except OSError as error:
        return judge_loopback(None, error.strerror or str(error))


def _round_trip_seconds(num: int = 50) -> float:
    """Return the median time of one byte there and back between two sockets of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2.0)
        with socket.create_connection(server.getsockname(), timeout=2.0) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(2.0)
                times: list[float] = []
                for _ in range(num):
                    start = time.perf_counter()
                    near.sendall(b"x")
                    far.recv(1)
                    far.sendall(b"x")
                    near.recv(1)
                    times.append(time.perf_counter() - start)
    return statistics.median(times)


def judge_loopback(seconds: float | None, problem: str = "") -> MachineCheck:
    """Judge the time of one byte there and back over 127.0.0.1; None: it failed with `problem`."""
    if seconds is None:
        return wrong(
            "loopback",
            f"127.0.0.1 cannot be used: {problem}",
            "ranks of one host meet there. Bring it up with `ip link set lo up`, and let the firewall pass it.",
        )
    value = f"127.0.0.1 answers in {format_seconds(seconds, 2)}"
    if seconds > _SLOW_LOOPBACK:
        return wrong("loopback", value, "that is slow: the cores are busy, or something looks at each packet.")
    return MachineCheck(what="loopback", value=value)


def _ports() -> MachineCheck:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return MachineCheck(what="ports", value="the system does not say which are free to use")
    return judge_ports(low, high, sum(1 for _ in _ports_in_use(low, high)))


def _ports_in_use(low: int, high: int) -> Iterator[int]:
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        ports.update(int(line.split()[1].rpartition(":")[2], 16) for line in lines)
    yield from (port for port in ports if low <= port <= high)


def judge_ports(low: int, high: int, used: int) -> MachineCheck:
    """Judge the range of ports that the system gives out, and how many of them are taken."""
    free = high - low + 1 - used
    value = f"{free:,} free of {low}–{high}"
    if free < _LEAST_PORTS:
        return wrong(
            "ports",
            value,
            'ranks take one per connection. Widen the range: sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
        )
    return MachineCheck(what="ports", value=value)


def _descriptors() -> MachineCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_descriptors(soft, hard)


def judge_descriptors(soft: int, hard: int) -> MachineCheck:
    """Judge how many files one process may hold open now (`soft`), and may ask for (`hard`); −1: without limit."""
    value = "no limit of open files" if soft < 0 else f"{soft:,} open files per process"
    if 0 <= soft < _LEAST_DESCRIPTORS:
        most = _LEAST_DESCRIPTORS if hard < 0 else min(hard, _LEAST_DESCRIPTORS)
        raise_it = f"Raise it: ulimit -n {most}" if most > soft else "Ask the administrator to raise it (nofile)."
        return wrong(
            "descriptors", value, f"a rank has a connection to every other one, its data and its saves. {raise_it}"
        )
    return MachineCheck(what="descriptors", value=value)


def _clock() -> MachineCheck:
    readings = [time.monotonic_ns() for _ in range(20_000)]
    steps = [after - before for before, after in zip(readings, readings[1:], strict=False)]
    return judge_clock(min(steps), statistics.median(steps) / 1e9)


def judge_clock(least_step_ns: int, read_seconds: float) -> MachineCheck:
    """Judge the monotonic clock by the least distance of two readings, and the time of one."""
    value = f"monotonic, read in {format_seconds(read_seconds, 2)}"
    if least_step_ns < 0:
        return wrong(
            "clock",
            f"goes back by {format_seconds(-least_step_ns / 1e9)}",
            "times of spans and timeouts will be wrong. Choose another clock source:"
            " /sys/devices/system/clocksource/clocksource0/current_clocksource",
        )
    if read_seconds > 1e-6:
        return wrong(
            "clock",
            value,
            "reading it is a system call here, so recording costs more than it should. Choose the"
            " clock source tsc or kvm-clock.",
        )
    return MachineCheck(what="clock", value=value)


def _clock_set() -> MachineCheck:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        # Zeros ask for nothing to be changed; what it answers says whether the clock is kept right.
        state = int(library.adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        state = -1
    return judge_clock_set(state)


def judge_clock_set(state: int) -> MachineCheck:
    """Judge what the kernel says of the wall clock (the status of adjtimex); −1: it does not say."""
    if state == _TIME_ERROR:
        return MachineCheck(
            what="wall clock",
            value="not kept right by NTP",
            state="note",
            change="times of several hosts may differ: and so do their logs. Install chrony"
            " where logs of hosts are compared.",
        )
    return MachineCheck(what="wall clock", value="kept right" if state >= 0 else "the system does not say")


# ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _disk(what: str, folder: Path) -> MachineCheck:
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        system = os.statvfs(folder)
        free = system.f_frsize * system.f_bavail
        sample = min(_DISK_SAMPLE, free // 4)
        return judge_disk(what, folder, free, _bytes_per_second(folder, sample) if sample else 0.0)
    except OSError as error:
        return wrong(
            what,
            f"{folder} cannot be written: {error.strerror}",
            "Give a folder that you may write (weft train --run-folder, or TMPDIR for the temp folder).",
        )


def _bytes_per_second(folder: Path, num_bytes: int) -> float:
    """Return the speed of writing a file until the disk has it; the file is removed."""
    content = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".weft-doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(max(1, num_bytes // len(content))):
            file.write(content)
        os.fsync(file.fileno())
        return max(1, num_bytes // len(content)) * len(content) / (time.perf_counter() - start)


def judge_disk(what: str, folder: Path, free_bytes: int, bytes_per_second: float) -> MachineCheck:
    """Judge the room of a folder's disk and the speed of writing to it."""
    value = f"{format_bytes(free_bytes)} free, writes {format_bytes(bytes_per_second)}/s ({folder.resolve()})"
    if free_bytes < _LEAST_DISK_BYTES:
        return wrong(
            what,
            value,
            f"below {format_bytes(_LEAST_DISK_BYTES)} a few saves fill it: remove old runs, or"
            " train where there is room.",
        )
    if bytes_per_second < _SLOW_DISK:
        return wrong(
            what,
            value,
            f"a save of 1 GB takes {format_seconds(1e9 / bytes_per_second, 2)}. Use a local disk,"
            " or save more rarely (run.save_every).",
        )
    return MachineCheck(what=what, value=value)
