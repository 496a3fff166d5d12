"""A pool of rank processes that lives as long as the test session.

Ranks are forked from a server that has imported torch and computed nothing, so a rank is ready in milliseconds and
torch is imported once for the whole suite.  Every run forms a fresh group (over Gloo, if nothing else is asked for) of
the first `world` ranks and destroys it afterwards.  A rank that dies or hangs is killed and replaced, so that one
broken test does not spoil the next.

Functions and results travel as pickles through the anonymous pipes between this process and its own children; nothing
in `src/` may do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first error: long enough for Gloo to notice that a peer has left."""
PRELOAD = ("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.pipelining", "safetensors.torch")
ECHOES = (
    *("closed by peer", "reset by peer", "Broken pipe", "timed out", "Timed out", "connectFullMesh"),
    *("cannot be finished: the process of", "has left the group"),
)
"""Of Gloo, and of the groups over shared memory."""
STOPPED = "stopped because another rank failed"


class RankError(Exception):
    """A rank died, hung, or raised what cannot be sent home."""


@dataclass(frozen=True)
class _Job:
    call: bytes
    """Pickle of (function, args, keywords)."""
    rank: int
    world: int
    store: str
    timeout: float
    path: list[str]
    filters: list[str]
    backend: str


@dataclass(frozen=True)
class _Outcome:
    value: bytes | None
    error: bytes | None = None
    summary: str = ""
    trace: str = ""
    when: float = 0.0

    @property
    def is_echo(self) -> bool:
        """Whether this error only says that another rank had one."""
        return self.summary == STOPPED or any(text in self.summary for text in ECHOES)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RankPool:
    """`run(world, function, *args)` calls a top-level function on the ranks of a fresh process group."""

    def __init__(self, size: int = 8, filters: Sequence[str] = (), backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend
        self._filters = list(filters)
        self._workers: dict[int, _Worker] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._folder: Path | None = None
        self._runs = 0

    def run(
        self,
        world: int,
        function: Callable[..., T],
        /,
        *args: Any,
        timeout: float = 60.0,
        backend: str | None = None,
        **keywords: Any,
    ) -> list[T]:
        """Call `function(*args, **keywords)` on `world` ranks and return what each returned, by rank.

        `torch.distributed` is initialised over the world when the function starts.  The first error of any rank is
        raised here, as its own type, with a note that holds the rank and its traceback; `timeout` (seconds) bounds the
        whole run and every collective in it.  `backend` is that of `init_process_group`, by default the pool's own.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world = {world}: the pool has 1 to {self.size} ranks")
        folder = self._start(world)
        self._runs += 1
        store = folder / f"store-{self._runs}"
        call = pickle.dumps((function, args, keywords))
        for rank in range(world):
            self._workers[rank].log.write_bytes(b"")
            job = _Job(call, rank, world, str(store), timeout, list(sys.path), self._filters, backend or self.backend)
            self._workers[rank].pipe.send(job)
        outcomes = self._collect(world, timeout)
        store.unlink(missing_ok=True)
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.value is None}
        if failed:
            self._raise(failed, world)
        return [pickle.loads(outcomes[rank].value or b"") for rank in range(world)]

    @contextlib.contextmanager
    def fresh(self) -> Generator[RankPool]:
        """Ranks beside these that have run nothing yet: what others left in memory is in nobody's way."""
        self._start(0)
        made = RankPool(self.size, self._filters, self.backend)
        try:
            yield made
        finally:
            made.close()

    def pids(self) -> set[int]:
        """Process ids of the ranks that are alive now."""
        return {worker.process.pid for worker in self._workers.values() if worker.process.pid is not None}

    def close(self) -> None:
        """End every rank."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, world: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
            self._context.set_forkserver_preload(list(PRELOAD))
            with _tracker_may_have_died():
                _start_server()
        for rank in range(world):
            worker = self._workers.get(rank)
            if worker is not None and not worker.process.is_alive():
                worker.kill()
                worker = None
            if worker is None:
                log = self._folder / f"rank{rank}.log"
                here, there = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(there, str(log)), daemon=False, name=f"rank{rank}")
                with _tracker_may_have_died():
                    process.start()
                there.close()
                self._workers[rank] = _Worker(process, here, log)
        return self._folder

    def _collect(self, world: int, timeout: float) -> dict[int, _Outcome]:
        waiting = {self._workers[rank].pipe: rank for rank in range(world)}
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout + 2.0  # collectives time out first, with a better message
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]  # wait() returns what it was given
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].value is None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            first_hand = any(outcome.value is None and not outcome.is_echo for outcome in outcomes.values())
            summary = STOPPED if first_hand else f"hung: no result after {timeout:g} s"
            outcomes[rank] = _Outcome(None, None, summary, _tail(self._workers[rank].log), time.monotonic())
            self._workers.pop(rank).kill()
        return outcomes

    def _receive(self, rank: int) -> _Outcome:
        try:
            outcome = self._workers[rank].pipe.recv()
        except (EOFError, ConnectionResetError):
            worker = self._workers.pop(rank)
            worker.process.join()
            code = worker.process.exitcode
            worker.kill()
            return _Outcome(None, None, f"died with exit code {code}", _tail(worker.log), time.monotonic() - 1.0)
        assert isinstance(outcome, _Outcome)
        return outcome

    def _raise(self, failed: dict[int, _Outcome], world: int) -> None:
        def order(rank: int) -> tuple[bool, float]:
            return failed[rank].is_echo, failed[rank].when

        first = min(failed, key=order)
        outcome = failed[first]
        logs = "" if first not in self._workers else _tail(self._workers[first].log)
        others = "".join(f"\n  rank {rank}: {failed[rank].summary}" for rank in sorted(failed) if rank != first)
        note = f"on rank {first} of {world}\n{outcome.trace}{logs}" + (f"\nother ranks:{others}" if others else "")
        if outcome.error is not None:
            error = pickle.loads(outcome.error)
            error.add_note(note)
            raise error
        raise RankError(f"rank {first} {outcome.summary}\n{note}")


@contextlib.contextmanager
def _tracker_may_have_died() -> Generator[None]:
    """Python's tracker of semaphores may have been ended by a test that ends all children it finds; it starts again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="resource_tracker: process died unexpectedly")
        yield


def _start_server() -> None:
    """Start the fork server in an environment in which its ranks use one thread and the loopback interface."""
    wanted = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, log: str) -> None:
    """Body of a rank: one job after another until the session closes the pipe."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the fork server ends with the session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's to handle
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    gc.freeze()  # what torch made while importing never becomes garbage; looking at it again costs 0.1 s a run
    known = len(sys.modules)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        outcome = _perform(job)
        if len(sys.modules) > known:  # and the same of what a job has imported: transformers alone costs 0.3 s
            known = len(sys.modules)
            while gc.collect():  # but nothing else that a job has left: what is frozen in, with its sockets, stays
                pass
            gc.freeze()
        pipe.send(outcome)


def _perform(job: _Job) -> _Outcome:
    environment = dict(os.environ)
    sys.path[:] = job.path
    try:
        with warnings.catch_warnings():
            _apply_filters(job.filters)
            value = pickle.dumps(_call(job))
        names = environment.keys() | os.environ.keys()
        changed = {name for name in names if environment.get(name) != os.environ.get(name)}
        if changed:
            raise RankError(f"the job left changed environment variables: {sorted(changed)}")
        outcome = _Outcome(value, when=time.monotonic())
    except BaseException as error:  # SystemExit and pytest's outcomes must reach the session too
        when = time.monotonic()
        trace = traceback.format_exc()
        outcome = _Outcome(None, _pickled(error), f"{type(error).__name__}: {error}", trace, when)
    else:
        return outcome
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()
    while gc.collect():  # again, for cycles that the error's traceback kept alive until here, and what these have held
        pass
    return outcome


def _call(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    from weft.comm.device import forget_meshes
    from weft.comm.shared_memory import register_shared_memory_backend

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(job.store, job.world)
    if "weft" in job.backend:
        register_shared_memory_backend()
    dist.init_process_group(
        job.backend, store=store, rank=job.rank, world_size=job.world, timeout=timedelta(seconds=job.timeout)
    )
    try:
        dist.barrier()  # a rank that returns at once must not leave while others still connect to it
        function, args, keywords = pickle.loads(job.call)
        value = function(*args, **keywords)
        if dist.is_initialized():
            dist.barrier()
        return value
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        gc.collect()  # Gloo keeps threads and sockets until the last reference to a group is gone


def _apply_filters(filters: list[str]) -> None:
    from _pytest.config import parse_warning_filter  # the one reader of this syntax; pytest exports no other

    for line in filters:
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def _pickled(error: BaseException) -> bytes | None:
    """Return the error as a pickle that can be read again, or None."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _tail(log: Path, lines: int = 20) -> str:
    try:
        text = log.read_text(errors="replace").strip()
    except OSError:
        return ""
    return "\noutput:\n" + "\n".join(text.splitlines()[-lines:]) if text else ""


def descendants(root: int) -> dict[int, str]:
    """Process id → command line of every live descendant of `root` (zombies left out)."""
    children: dict[int, list[int]] = {}
    # Twice for each test: with Path.read_text this takes five times as long.
    for name in os.listdir("/proc"):
        if name[0].isdigit() and (stat := _read(f"/proc/{name}/stat")):
            state, parent, _ = stat.rpartition(b")")[2].split(None, 2)
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found: dict[int, str] = {}
    pending = list(children.get(root, ()))
    while pending:
        pid = pending.pop()
        if command := _read(f"/proc/{pid}/cmdline"):
            found[pid] = command.decode(errors="replace").replace("\0", " ").strip()
            pending.extend(children.get(pid, ()))
    return found


def _read(path: str) -> bytes:
    """Return the first 64 KiB of a file of /proc; nothing where its process has just ended."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)


def listening_ports(pids: set[int]) -> set[str]:
    """`address:port` of every TCP socket on which one of `pids` listens."""
    try:
        listening = _listening_sockets()
    except OSError:  # a kernel that answers no such questions
        listening = _listening_by_table()
    if not listening:  # as after most tests: nobody's descriptors need to be read
        return set()
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has just ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # the descriptor that listed the others is closed by now
                    found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {address for socket, address in listening.items() if socket in found}


_SOCK_DIAG, _ERROR, _BY_FAMILY, _DUMP, _TCP_LISTEN = 4, 2, 20, 0x301, 1 << 10
"""Numbers of `linux/sock_diag.h` and `linux/netlink.h`."""


def _listening_sockets() -> dict[str, str]:
    """Name of a descriptor → address, asked of the kernel: /proc/net/tcp goes through all connections that there may
    be, which takes 10 ms, twice for each test."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asked:
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _TCP_LISTEN) + bytes(48)
            asked.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
            answers = iter(lambda: asked.recv(1 << 16), b"")
            while (rest := next(answers)) and _kind(rest) == _BY_FAMILY:
                while rest and _kind(rest) == _BY_FAMILY:
                    (length,) = struct.unpack_from("=I", rest)
                    (port,), (inode,) = struct.unpack_from("!H", rest, 20), struct.unpack_from("=I", rest, 84)
                    address = rest[24 : 28 if family == socket.AF_INET else 40]
                    found[f"socket:[{inode}]"] = f"{socket.inet_ntop(family, address)}:{port}"
                    rest = rest[(length + 3) & ~3 :]
                if rest:  # the end of the answer
                    break
            if _kind(rest) == _ERROR:
                raise OSError("the kernel does not list sockets")
    return found


def _kind(message: bytes) -> int:
    return struct.unpack_from("=H", message, 4)[0]


def _listening_by_table() -> dict[str, str]:
    """The same; an address is hexadecimal, but for that of loopback."""
    found: dict[str, str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in Path(table).read_text().splitlines()[1:]]
            found |= {f"socket:[{row[9]}]": row[1].replace("0100007F", "127.0.0.1") for row in rows if row[3] == "0A"}
    return found


def mapped_elsewhere(names: set[str]) -> set[str]:
    """Those of `names` in /dev/shm that another session's process has mapped, or owns as a folder.

    By their inodes: a semaphore is mapped under a name that it had for a moment, before it got its own.
    """
    ours = {os.getpid(), *descendants(os.getpid())}
    others = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) not in ours]
    used: set[int] = set()
    for entry in others:
        try:
            lines = (entry / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        used |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    folder = Path("/dev/shm")
    return {name for name in names if _inode(folder / name) in used or _owner(folder / name) not in {0, *ours}}


def _owner(path: Path) -> int:
    """Process that a folder names as its owner; 0: none, or one that lives no more."""
    try:
        pid = int(json.loads((path / "owner.json").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return 0
    return pid if Path(f"/proc/{pid}").exists() else 0


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # gone since it was listed
        return None


def helper_pids() -> set[int]:
    """The fork server and the resource tracker, which live as long as the session."""
    from multiprocessing import resource_tracker

    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public name
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # no public name
    return {pid for pid in (server, tracker) if pid is not None}


def living_threads() -> set[threading.Thread]:
    """Threads of this process that would keep it alive."""
    return {thread for thread in threading.enumerate() if not thread.daemon}
