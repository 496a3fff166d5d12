"""The life of a freshly forked rank: it runs its function or script, and reports how that ended."""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from weft.errors import WeftError
from weft.run.launch._failure_notice import RankFailure, failure_pipe_path, notify_other_ranks
from weft.run.launch._job import HostPart, LaunchJob, RankExit
from weft.run.launch._rank_info import RankInfo, stacks_path
from weft.run.launch._secondary_errors import is_secondary_error
from weft.run.launch._threads import set_threads_of_job
from weft.run.launch.launchers._variables import FAILURE_PIPE_VARIABLE

_TRACE_FRAMES = 4
_OWN_FILES = ("<frozen runpy>", "<frozen importlib._bootstrap>", __file__)
_CALL_FRAMES = ("_wrapped_call_impl", "_call_impl")
"""Frames that torch puts between any two modules; they would push the user's line out."""


STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a rank writes the stacks of its threads into the job's private folder, whatever it does just then."""


def run_rank(job: LaunchJob, rank: int, folder: Path, port: int | None) -> int:
    """Run one rank of `job`, by its number in the whole job, to its end; return its exit status.  `port` is where
    scripts meet."""
    # The fork server ignores SIGINT; a rank must not inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(job, rank)
    stacks = _write_stacks_when_asked(folder, rank)
    status, value, error = 0, None, None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came while this rank was being forked
        _limit_threads(job)
        value = _run(job, rank, folder, port)
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        error = leave if status else None
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
    except KeyboardInterrupt as interrupt:
        status, error = 130, interrupt
    except BaseException as failure:  # whatever ends the rank is reported, and printed once by the launcher
        status, error = 1, failure
    try:
        _outcome(rank, value, error, status).write(folder)
    except (TypeError, ValueError) as failure:  # the function returned what JSON cannot hold
        status, error = 1, failure
        _outcome(rank, None, error, status).write(folder)
    # The rank itself says why it fails, before it ends: its parent would only know an exit code.  A rank that fails
    # because another is gone says nothing, for the others know already.
    if error is not None and not is_secondary_error(str(error)):
        first_line = next(iter(str(error).splitlines()), "")
        notify_other_ranks(folder, job.ranks, RankFailure(rank, f"stopped with {type(error).__name__}: {first_line}"))
    if error is not None and job.logs is not None:
        traceback.print_exception(error)
    _flush()
    stacks.close()
    return status


def _write_stacks_when_asked(folder: Path, rank: int) -> IO[str]:
    """Let C code answer the launcher's signal: it does so even where no Python runs any more.  The launcher empties the
    file before it asks."""
    stacks = stacks_path(folder, rank).open("a")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    return stacks


def _run(job: LaunchJob, rank: int, folder: Path, port: int | None) -> Any:
    """Run the function or script, and close the sessions that it has left open."""
    value = None
    try:
        if job.kind == "function":
            value = _call(job, rank, folder)
        elif job.kind == "cells":
            from weft.run.launch._cells import run_sources  # other ranks need none of it

            _set_rank_environment(job, rank, folder, port)
            value = run_sources(job, folder / f"cells-{rank}")
        else:
            _run_script(job, rank, folder, port)
    except BaseException as error:
        _run_exit_hooks(error)
        raise
    _run_exit_hooks(None)
    return value


def _run_exit_hooks(error: BaseException | None) -> None:
    if "weft.run.launch.exit_hooks" in sys.modules:  # whoever has opened something has loaded it
        from weft.run.launch.exit_hooks import run_exit_hooks

        run_exit_hooks(error)


def _redirect(job: LaunchJob, rank: int) -> None:
    """Send what this rank prints to its own file; rank 0 of a function speaks to the person at the terminal."""
    if job.logs is None or (job.kind == "function" and rank == 0):
        return
    path = Path(job.logs) / f"rank{rank}.out"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _limit_threads(job: LaunchJob) -> None:
    """torch was imported before it was known how many there would be, unless the user's environment says so."""
    if not job.threads_given:
        from torch import set_num_threads

        set_threads_of_job(job.threads_per_rank)
        set_num_threads(job.threads_per_rank)


def _call(job: LaunchJob, rank: int, folder: Path) -> Any:
    pipe = str(failure_pipe_path(folder, rank))
    if job.part is None:
        rank_info = RankInfo(rank, job.num_processes, rank, job.num_processes, str(folder / "store"), pipe)
    else:
        part, local_rank = job.part, rank - job.part.first_rank
        numbers = (rank, part.world_size, local_rank, job.num_processes)
        rank_info = RankInfo(*numbers, None, pipe, address=part.store, launcher_serves=True)
    module, _, name = job.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    assert isinstance(job.arguments, dict)
    return function(rank_info, **job.arguments)


def _set_rank_environment(job: LaunchJob, rank: int, folder: Path, port: int | None) -> None:
    """Say in the standard variables where this rank stands, as torchrun does."""
    part = job.part or HostPart(first_rank=0, world_size=job.num_processes, store=f"127.0.0.1:{port}")
    address, _, own_port = part.store.rpartition(":")
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank - part.first_rank)}
        | {"WORLD_SIZE": str(part.world_size), "LOCAL_WORLD_SIZE": str(job.num_processes)}
        | {"GROUP_RANK": str(part.number), "GROUP_WORLD_SIZE": str(part.num_hosts)}
        | {"MASTER_ADDR": address, "MASTER_PORT": own_port}
        # The store is the launcher's and listens on one address only; rank 0's own would listen on every interface.
        | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}
        | {"TORCHELASTIC_RESTART_COUNT": str(job.num_restarts)}
        | {FAILURE_PIPE_VARIABLE: str(failure_pipe_path(folder, rank))}
    )


def _run_script(job: LaunchJob, rank: int, folder: Path, port: int | None) -> None:
    """Run a script that reads its place from the standard variables, as under torchrun."""
    _set_rank_environment(job, rank, folder, port)
    sys.argv = [job.target, *job.arguments]
    if job.kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(job.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(job.target).resolve().parent))
        runpy.run_path(job.target, run_name="__main__")


def _outcome(rank: int, value: Any, error: BaseException | None, status: int) -> RankExit:
    if error is None:
        return RankExit(rank=rank, host=socket.gethostname(), when=time.monotonic(), value=value, status=status)
    message = f"exit status {status}" if isinstance(error, SystemExit) else str(error)
    is_weft_error = isinstance(error, WeftError)
    return RankExit(
        rank=rank,
        host=socket.gethostname(),
        when=time.monotonic(),
        error=type(error).__name__,
        message=message,
        trace=error.lines_of_user() if isinstance(error, WeftError) else _innermost(error.__traceback__),
        is_weft_error=is_weft_error,
        weft_status=error.status if isinstance(error, WeftError) else 2,
        status=status,
    )


def _innermost(trace: TracebackType | None) -> list[str]:
    """The last calls of a traceback: the user's own line is nearly always among them."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if frame.filename not in _OWN_FILES and frame.name not in _CALL_FRAMES
    ]
    lines: list[str] = []
    for frame in frames[-_TRACE_FRAMES:]:
        lines.append(f"  {frame.filename}, line {frame.lineno}, in {frame.name}")
        if frame.line:
            lines.append(f"    {frame.line}")
    return lines


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it any more
            continue
