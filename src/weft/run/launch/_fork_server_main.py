"""The main program of the fork server: it imports torch, computes nothing, and forks ranks.

A rank forked from it is at work within a tenth of a second, where a fresh interpreter needs seconds to import torch.
It runs as a script, so that its children's children (data workers) can import it again cheaply.  For every job it forks
a parent of that job's ranks, which obeys one pipe and reports on another; when the first closes, because the launcher
ended in whatever way, it kills every rank and ends.

    launcher ── fork server ── parent of the first job ── ranks
                            └─ parent of the second  ── ranks, after the first has ended
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.run.launch._job import LaunchJob

TERMINATE = 0
"""Command of the launcher: SIGTERM to all ranks, then SIGKILL to those that are left after
`TERMINATE_TIMEOUT_SECONDS`.  Every other command is the number of a signal to send."""
TERMINATE_TIMEOUT_SECONDS = 5.0


def serve(control: socket.socket, preload: list[str]) -> int:
    """Carry out the launcher's jobs, one after another, until it is gone.  In a rank: run it and return its status."""
    from weft.process import die_with
    from weft.run.launch._job import LaunchJob

    for name in ("torch", "torch.distributed"):
        importlib.import_module(name)
    _import(*preload)
    fork_server = os.getpid()
    for number in itertools.count(1):
        # One job at a time, and each in a child: what a job imports before its ranks are forked happens here and stays
        # for the next job, whereas the ranks, their pipes and their orphans belong to the child and end with it.
        folder, descriptors = _next_job(control)
        job = LaunchJob.read(folder)
        with contextlib.suppress(OSError):  # a folder that is gone is the ranks' to find out
            os.chdir(job.working_folder)
        _preload(job)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            control.close()  # else the launcher would not see the fork server's end while a job runs
            die_with(fork_server)
            return parent_ranks(job, folder, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            control.sendall(f"{number} {os.waitstatus_to_exitcode(status)}\n".encode())
    raise AssertionError("counting has no end")


def _next_job(control: socket.socket) -> tuple[Path, list[int]]:
    """Wait for the folder of a job, and its pipes; end where the launcher has."""
    word, descriptors = b"", list[int]()
    with contextlib.suppress(ConnectionResetError):
        word, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
    if not word:
        os._exit(0)  # taking torch apart would keep the launcher waiting
    return Path(os.fsdecode(word)), descriptors


def parent_ranks(job: LaunchJob, folder: Path, commands: int, events: int) -> int:
    """Start the ranks of a job, and end when all have ended.  In a rank: run it and return its status."""
    from weft.process import adopt_orphans, die_with
    from weft.run.launch._failure_notice import open_failure_pipes
    from weft.run.launch._rank import STACKS_SIGNAL, run_rank

    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # a rank that has no handler for it yet must not die of it
    adopt_orphans()  # what a rank leaves, stopped data workers among it, is ended here
    failure_pipes = open_failure_pipes(folder, job.ranks)
    # A Ctrl-C may come while ranks are being forked.  They inherit the blocked signal, and unblock it once their
    # handler is in place: until then it stays pending, and none is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)  # a signal handler must never wait for a full pipe
    # Scripts meet at MASTER_ADDR and MASTER_PORT, as under torchrun; functions meet at a file in the job's folder, and
    # ranks of several hosts at the leader's store.  The port is bound before the fork, so that no other process can
    # take it before the store listens.
    listener = _loopback_listener() if job.kind != "function" and job.part is None else None
    port = listener.getsockname()[1] if listener is not None else None
    parent = os.getpid()
    ranks: dict[int, int] = {}
    for rank in job.ranks:
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            _close([commands, events, wake_read, wake_write, *failure_pipes.values()], listener)
            return run_rank(job, rank, folder, port)
        ranks[pid] = rank
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone; its pipe of commands says so, too
            os.write(events, f"{rank} {pid}\n".encode())
    # After the forks: the store starts threads, and only the forking thread lives on in a child.
    store = _serve_store(listener, job.num_processes)
    # The wake-up pipe turns SIGCHLD into something that `select` can wait for, without a race between the two.
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, _wake)
    launcher_lives = _watch(ranks, commands, events, wake_read, failure_pipes)
    _end_stopped_orphans()
    if not launcher_lives:  # it can no longer remove what it has made
        for left in (folder, *([Path(job.memory)] if job.memory is not None else [])):
            shutil.rmtree(left, ignore_errors=True)
    del store
    os._exit(0)  # everything is closed; taking torch apart would keep the launcher waiting


def _preload(job: LaunchJob) -> None:
    """Import what every rank of this job needs, so that ranks get it by fork."""
    sys.path[:] = job.import_path
    if job.kind == "function" or job.preload:
        _import(*([job.target.partition(":")[0]] if job.kind == "function" else []), *job.preload)


def _import(*names: str) -> None:
    with contextlib.suppress(Exception, SystemExit):  # the ranks run into the same error, and report it
        for name in names:
            importlib.import_module(name)
    # A collection in a rank would write to the headers of all these objects, and so copy pages that are shared by fork.
    gc.freeze()


def _close(descriptors: list[int], listener: socket.socket | None) -> None:
    """Cut a rank's ties with what only its parent needs."""
    for descriptor in descriptors:
        os.close(descriptor)
    if listener is not None:
        listener.close()


def _loopback_listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _serve_store(listener: socket.socket | None, num_processes: int) -> object:
    """Serve the store at which a script's ranks meet on the given socket: torch's own listens on all interfaces."""
    if listener is None:
        return None
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    return TCPStore(
        host, port, num_processes, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _watch(ranks: dict[int, int], commands: int, events: int, wake: int, failure_pipes: dict[int, int]) -> bool:
    """Report every rank that ends, to the launcher and where it failed to the others; obey until none is left.

    Returns whether the launcher lives.
    """
    living, launcher_lives = dict(ranks), True
    kill_at: float | None = None
    # A rank may have ended before the handler of SIGCHLD was set; nothing wakes this loop for it.
    _reap(living, events, failure_pipes)
    while living:
        timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([commands, wake], [], [], timeout)
        if wake in ready:
            os.read(wake, 4096)
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal_all(living, signal.SIGKILL)  # these had their time to end by themselves
            kill_at = None
        # An empty read means that the launcher has ended, in whatever way: its ranks must not outlive it.
        if commands in ready:
            orders = os.read(commands, 4096)
            launcher_lives = bool(orders)
            for order in orders or [signal.SIGKILL]:  # nothing to read: the launcher is gone
                _signal_all(living, signal.SIGTERM if order == TERMINATE else signal.Signals(order))
                if order == TERMINATE:
                    _signal_all(living, signal.SIGCONT)  # SIGTERM stays pending in a stopped process
                    kill_at = time.monotonic() + TERMINATE_TIMEOUT_SECONDS
        _reap(living, events, failure_pipes)
    return launcher_lives


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that there is a handler makes Python write to the wake-up pipe."""


def _reap(living: dict[int, int], events: int, failure_pipes: dict[int, int]) -> None:
    from weft.run.launch._failure_notice import RankFailure, describe_exit, notify

    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid not in living:  # left by a rank, and adopted
            continue
        code = os.waitstatus_to_exitcode(status)
        rank = living.pop(pid)
        line = f"{rank} {code} {time.monotonic()}\n".encode()
        # The other ranks are notified before the launcher: they are in collectives that wait for this rank.
        if code:
            notify((failure_pipes[other] for other in living.values()), RankFailure(rank, describe_exit(code)))
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone; its pipe of commands says so, too
            os.write(events, line)


def _end_stopped_orphans() -> None:
    """Kill what ranks have left that cannot notice their end."""
    from weft.process import children_of, is_stopped

    for pid in children_of(os.getpid()):
        if is_stopped(pid):
            os.kill(pid, signal.SIGKILL)  # a child, so the number is still its


def _signal_all(living: dict[int, int], number: signal.Signals) -> None:
    from weft.process import is_stopped
    from weft.run.launch._rank import STACKS_SIGNAL

    for pid in living:
        # A stopped process answers when it goes on, and maybe in another thread than the main one, whose frames are
        # then read while they change.
        if number != STACKS_SIGNAL or not is_stopped(pid):
            os.kill(pid, number)  # not reaped yet, so the number is still theirs


def _receive_setup(control: socket.socket) -> dict[str, list[str]]:
    """Read the launcher's first message, import path and modules to preload: four bytes of length, then JSON."""
    length = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "little")
    text = control.recv(length, socket.MSG_WAITALL) if length else b""
    if len(text) < length or not length:
        os._exit(0)  # the launcher is gone
    return json.loads(text)


if __name__ == "__main__":
    CONTROL = socket.socket(fileno=int(sys.argv[1]))
    SETUP = _receive_setup(CONTROL)
    sys.path[:] = SETUP["import_path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Job engines such as Slurm send SIGTERM to every process of a job.  The ranks save then, and need their parent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(serve(CONTROL, SETUP["preload"]))
