"""Starts ranks on this machine from a fork server, and reports how they ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS
from weft.errors import LaunchError
from weft.events import FailureEvent, Run, RunFolder, Sink, WarningEvent
from weft.events.progress import ProgressBoard
from weft.events.sinks.log import LogSink
from weft.events.sinks.metrics import MetricsSink
from weft.events.sinks.warnings import WarningSink
from weft.process import is_ending, state_of
from weft.run.launch._cells import check_arguments, collect_sources
from weft.run.launch._fork_server import ForkServer as ForkServer
from weft.run.launch._fork_server import open_fork_server as open_fork_server
from weft.run.launch._hang import HangLimits as HangLimits
from weft.run.launch._hang import HangWatch
from weft.run.launch._job import HostPart as HostPart
from weft.run.launch._job import LaunchJob, RankExit
from weft.run.launch._rank import STACKS_SIGNAL
from weft.run.launch._rank_info import job_note, progress_path, rings_note, run_folder_note
from weft.run.launch._report import first_cause, is_secondary_or_timeout, missing_rank
from weft.run.launch._stopped import StoppedProcesses
from weft.run.launch._straggler import StragglerWatch
from weft.run.launch._watch_ranks import RunningJob, forwarding_signals, watch_ranks
from weft.run.launch.job_end import HANG, PARENT_LOST, JobEnd
from weft.run.launch.job_end import RankError as RankError

_POLL_SECONDS_OF_HOSTS = 0.1
"""Interval of looks at other hosts' ends: a part of the time without training after one was lost."""
_ENDING_SECONDS, _POLL_ENDS_SECONDS = 5.0, 0.002
"""Longest wait for ranks that are killed with their parent, and the pause between two looks."""


def launch_function(
    function: str,
    arguments: Mapping[str, Any],
    num_processes: int,
    *,
    threads_per_rank: int | None = None,
    logs: Path | None = None,
    import_path: Sequence[str] | None = None,
    preload: Sequence[str] = (),
    fork_server: ForkServer | None = None,
    stopped_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Call `function(rank_info, **arguments)` in fresh processes on this machine; return what each returned, by rank.

    `arguments` and results are what JSON can hold: nothing is pickled.  SIGINT and SIGTERM are passed to the ranks
    once; a further SIGINT kills them, a further SIGTERM changes nothing.  Ranks never outlive this process.

    Args:
        function: `package.module:function`, importable by the ranks.  Its first argument is its `RankInfo`.
        num_processes: how many ranks.
        threads_per_rank: OpenMP threads of each; by default the cores are shared out.
        logs: folder that gets `rank<r>.out` with what each rank prints; rank 0 prints to the terminal all the same.
        import_path: where ranks find modules; by default where this process does.
        preload: modules that the ranks will need beside that of the function, and get by fork if they are named here.
            Importing them must neither compute nor start threads.
        fork_server: that the ranks are forked from; by default one is started for them.
        stopped_timeout_seconds: how long a process of the job may be stopped (SIGSTOP) before the run ends.  It is
            named after a second; one that goes on in time costs nothing.
        meanwhile: called in this process while the ranks run.  What it raises is raised here, and ends the ranks; a
            rank that fails is noticed when it has returned.

    Raises:
        WeftError: the one that a rank raised, of its own class.
        RankError: a rank died, or raised an error of another kind.
        KeyboardInterrupt: Ctrl-C ended the ranks.
    """
    job = _job("function", function, dict(arguments), num_processes, threads_per_rank, logs, import_path, preload)
    end = _run_to_end(job, fork_server, stopped_timeout_seconds, meanwhile)
    end.raise_cause()
    return end.values


def run_function(
    function: str,
    arguments: Mapping[str, Any],
    num_processes: int,
    *,
    threads_per_rank: int | None = None,
    fork_server: ForkServer | None = None,
    stopped_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    hang_limits: HangLimits | None = None,
    memory: Path | None = None,
    signal_to_send: Callable[[], signal.Signals | None] = lambda: None,
    part: HostPart | None = None,
    is_over_elsewhere: Callable[[], bool] = lambda: False,
    rings: Path | None = None,
) -> JobEnd:
    """Call `function(rank_info, **arguments)` as `launch_function` does, and return how that ended: nothing that a rank
    fails by is raised.

    With `hang_limits` a training whose step makes no progress is ended, too.  The other ranks are killed as soon as a
    signal has killed one: this is for a caller that starts them again.  `memory` is a folder in the host's memory that
    belongs to this process; it is removed when this process is killed.  `signal_to_send` is asked twice a second for a
    signal that the ranks shall get.  Where the job has other hosts, `num_processes` and `part` are what this one has
    of it, and `is_over_elsewhere` is asked ten times a second whether ranks there have ended: then these are killed.
    Ranks record what they do in `rings`, a folder for this generation's alone.

    Raises:
        LaunchError: no ranks could be started, or the process that started them was killed.
    """
    job = _job("function", function, dict(arguments), num_processes, threads_per_rank, None, None)
    job = replace(job, memory=None if memory is None else str(memory), part=part)
    supervision = _Supervision(hang_limits, signal_to_send, is_over_elsewhere=is_over_elsewhere, rings=rings)
    return _run_to_end(job, fork_server, stopped_timeout_seconds, supervision=supervision)


def run_script(
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    *,
    module: bool = False,
    under: str | None = None,
    threads_per_rank: int | None = None,
    logs: Path | None = None,
    preload: Sequence[str] = (),
    num_restarts: int = 0,
    fork_server: ForkServer | None = None,
    stopped_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    hang_limits: HangLimits | None = None,
    memory: Path | None = None,
    signal_to_send: Callable[[], signal.Signals | None] = lambda: None,
    prepare: Callable[[Path], object] = lambda folder: None,
    conclude: Callable[[], object] = lambda: None,
    starts_again: Callable[[], bool] = lambda: True,
    part: HostPart | None = None,
    is_over_elsewhere: Callable[[], bool] = lambda: False,
    rings: Path | None = None,
) -> JobEnd:
    """Run a script as `launch_script` does, and return how that ended, as `run_function` does.

    `prepare` is called with the job's private folder before the ranks start, `conclude` when all have ended and the
    folder is still there, and `starts_again` when a signal has killed one: whether the others can be killed at once,
    because the script starts again.  A session records what it does in `rings`.  Ranks find `num_restarts` in
    TORCHELASTIC_RESTART_COUNT.  `part` and `is_over_elsewhere` are as of `run_function`.

    Raises:
        LaunchError: there is no such script, or no ranks could be started.
    """
    job = _script_job(script, arguments, num_processes, module, under, threads_per_rank, logs, preload)
    job = replace(job, memory=None if memory is None else str(memory), num_restarts=num_restarts, part=part)
    supervision = _Supervision(hang_limits, signal_to_send, prepare, conclude, starts_again, is_over_elsewhere, rings)
    return _run_to_end(job, fork_server, stopped_timeout_seconds, supervision=supervision)


def launch_cells(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    num_processes: int,
    *,
    threads_per_rank: int | None = None,
    fork_server: ForkServer | None = None,
    stopped_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
) -> list[Any]:
    """Call `function(**arguments)`, of a notebook's cell or of a script, on ranks; return what each returned, by rank.

    Its source is handed over with that of what it names (`weft.run.launch._cells`).  The ranks find their places as a
    script's do, so that `weft.session()` joins them.

    Raises:
        LaunchError: the function needs an object that lives in this process alone.
        WeftError, RankError, KeyboardInterrupt: as from `launch_function`.
    """
    sources = [[source.file, source.line, source.source] for source in collect_sources(function)]
    check_arguments(function, arguments)
    payload = {"sources": sources, "arguments": dict(arguments)}
    preload = ("weft.api",)
    job = _job("cells", function.__name__, payload, num_processes, threads_per_rank, None, None, preload)
    end = _run_to_end(job, fork_server, stopped_timeout_seconds)
    end.raise_cause(is_user_function=True)
    return end.values


@dataclass(frozen=True, slots=True)
class _Supervision:
    """What a caller asks for that starts ranks again."""

    hang_limits: HangLimits | None
    signal_to_send: Callable[[], signal.Signals | None]
    prepare: Callable[[Path], object] = lambda folder: None
    conclude: Callable[[], object] = lambda: None
    starts_again: Callable[[], bool] = lambda: True
    is_over_elsewhere: Callable[[], bool] = lambda: False
    rings: Path | None = None

    def signal_once_begun(self, board: ProgressBoard) -> Callable[[], signal.Signals | None]:
        """Ask for signals only while all ranks are in their loops: one that has no handler yet would die of them."""

        def ask() -> signal.Signals | None:
            begun = all(board.position(rank).has_begun for rank in range(board.num_ranks))
            return self.signal_to_send() if begun else None

        return ask


def _run_to_end(
    job: LaunchJob,
    fork_server: ForkServer | None,
    stopped_timeout_seconds: float,
    meanwhile: Callable[[], object] | None = None,
    *,
    supervision: _Supervision | None = None,
) -> JobEnd:
    """Run a job to its end, and write into the folder of its run how it failed.  With `supervision` the caller may
    start the ranks again, so nothing is said yet of how to go on."""
    with _private_folder() as folder, _LauncherRun(folder, WarningSink()) as run:
        running = _run(job, folder, fork_server, stopped_timeout_seconds, run, meanwhile, supervision)
        end = _end_of(running, folder)
        if supervision is not None:
            supervision.conclude()
            if end.has_left_to_go_on and (running.signals or running.stopped_cause is None):
                return replace(end, cause=None)
        if end.cause is not None and not running.signals and not end.was_ended:
            run.fail_with(end, None, is_final=supervision is None)
    return end


def launch_script(
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    *,
    module: bool = False,
    under: str | None = None,
    threads_per_rank: int | None = None,
    logs: Path | None = None,
) -> int:
    """Run a script on `num_processes` ranks of this machine and return the exit status for the caller's own exit.

    The script reads its place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun, so
    `torch.distributed.init_process_group()` and `weft.session()` both work.  The first cause of a failure is printed
    once on stderr.  With `module`, `script` is the name of a module.  `under` is a module that runs it, as in
    `python -m under script …` and `python -m under -m script …`.

    Raises:
        LaunchError: there is no such script.
    """
    job = _script_job(script, arguments, num_processes, module, under, threads_per_rank, logs)
    with _private_folder() as folder, _LauncherRun(folder, WarningSink(failures=True)) as run:
        running = _run(job, folder, None, COLLECTIVE_TIMEOUT_SECONDS, run)
        if running.signals and any(running.codes.values()):
            return 128 + running.signals[0]
        end = _end_of(running, folder)
        if end.cause is None:
            return 0
        run.fail_with(end, logs)
        return end.cause.status


def _script_job(
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    module: bool,
    under: str | None,
    threads: int | None,
    logs: Path | None,
    preload: Sequence[str] = (),
) -> LaunchJob:
    if not module and not Path(script).is_file():
        raise LaunchError(f"there is no script {script} (in {os.getcwd()}). Give the path of a Python file.")
    if not script:
        raise LaunchError("the name of the module is empty. Give one that `python -m` would take.")
    kind = "module" if module or under else "script"
    words = [*(["-m"] if under and module else []), *([script] if under else []), *arguments]
    return _job(kind, under or script, words, num_processes, threads, logs, None, preload)


class _LauncherRun(Run):
    """Events of the launcher: on the terminal, and in the folder of the run once the ranks have reported it."""

    def __init__(self, folder: Path, terminal: Sink) -> None:
        super().__init__(None, [terminal])
        self._note = run_folder_note(folder)
        self._run_folder: RunFolder | None = None

    def warn(self, text: str) -> None:
        """Say what the user should know, while ranks run."""
        self._find_folder()
        self.emit(WarningEvent(text=text, source="weft.run.launch"))

    def fail_with(self, end: JobEnd, logs: Path | None, *, is_final: bool = True) -> None:
        """Say why the job has ended, after all ranks have: its metrics have no other writer any more.  Where that is
        final, say how to go on, too."""
        cause = end.cause
        assert cause is not None
        self._find_folder()
        if self._run_folder is not None:
            self.attach(MetricsSink(self._run_folder.metrics))
        text = end.report(logs)
        if is_final and self._run_folder is not None and (further := self._run_folder.how_to_go_on()):
            text = f"{text}\n{further}"
        self.emit(FailureEvent(error=cause.error or "died", text=text, rank=cause.rank, host=cause.host))

    def _find_folder(self) -> None:
        if self._run_folder is None and self._note.is_file():
            self._run_folder = RunFolder(Path(self._note.read_text()))
            if self._run_folder.path.is_dir():
                self.attach(LogSink(self._run_folder.launcher_log))


def _job(
    kind: Any,
    target: str,
    arguments: dict[str, Any] | list[str],
    num_processes: int,
    threads: int | None,
    logs: Path | None,
    import_path: Sequence[str] | None,
    preload: Sequence[str] = (),
) -> LaunchJob:
    if num_processes < 1:
        raise LaunchError(f"num_processes = {num_processes}: a job has at least 1 process.")
    if threads is not None and threads < 1:
        raise LaunchError(f"threads = {threads}: a process has at least 1.")
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise LaunchError(f"the folder of logs {logs} cannot be made: {problem.strerror}. Give a folder.") from None
    path = [os.path.abspath(entry) for entry in (sys.path if import_path is None else import_path)]
    return LaunchJob(
        kind=kind,
        target=target,
        arguments=arguments,
        num_processes=num_processes,
        threads_per_rank=threads or max(1, (os.cpu_count() or 1) // num_processes),
        threads_given="OMP_NUM_THREADS" in os.environ,
        working_folder=os.getcwd(),
        import_path=path,
        preload=list(preload),
        logs=None if logs is None else str(logs.resolve()),
    )


@contextlib.contextmanager
def _private_folder() -> Generator[Path]:
    """A temporary folder that only this user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="weft-launch-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(
    job: LaunchJob,
    folder: Path,
    fork_server: ForkServer | None,
    stopped_timeout_seconds: float,
    run: _LauncherRun,
    meanwhile: Callable[[], object] | None = None,
    supervision: _Supervision | None = None,
) -> RunningJob:
    """Run the job to the end of its last rank."""
    job.write(folder)
    board = ProgressBoard.create(progress_path(folder), job.num_processes)
    with contextlib.ExitStack() as stack:
        theirs, commands, events, reports = (
            stack.enter_context(os.fdopen(end, mode, buffering=0))
            for end, mode in zip((*os.pipe(), *os.pipe()), ("rb", "wb", "rb", "wb"), strict=True)
        )
        running = RunningJob(commands, job.num_processes, StoppedProcesses(stopped_timeout_seconds, run.warn))
        running.first_rank = job.ranks[0]
        if supervision is not None:
            supervision.prepare(folder)
            if supervision.rings is not None:
                rings_note(folder).write_text(str(supervision.rings))
                job_note(supervision.rings).write_text(str(folder))
            running.kills_survivors = supervision.starts_again
            running.is_over_elsewhere = supervision.is_over_elsewhere
            if job.part is not None:
                running.poll_seconds = _POLL_SECONDS_OF_HOSTS
            running.signal_to_send = supervision.signal_once_begun(board)
            if supervision.hang_limits is not None:
                running.read_exit = partial(RankExit.read, folder)
                limits = supervision.hang_limits
                running.stragglers = StragglerWatch(board, limits.peers, run.warn) if limits.peers else None
                ask, pids = partial(running.send_command, STACKS_SIGNAL), running.stopped.ranks
                running.hang = HangWatch(board, folder, limits, ask, running.first_rank, pids)
        # With `meanwhile` the caller's own code runs here first, which Ctrl-C must interrupt; handlers come after it.
        if meanwhile is None:
            stack.enter_context(forwarding_signals(running))
        if fork_server is None:
            new = ForkServer(threads_per_rank=job.threads_per_rank, import_path=job.import_path)
            fork_server = stack.enter_context(new)
        running.stopped.fork_server = fork_server.pid
        fork_server.begin(folder, theirs.fileno(), reports.fileno())
        # The fork server has copies of these ends.  Closed here, an end of file on `events` means that it is gone.
        theirs.close()
        reports.close()
        try:
            if meanwhile is not None:
                meanwhile()  # Ctrl-C interrupts it as it would without ranks, and these end below
                stack.enter_context(forwarding_signals(running))
            watch_ranks(running, events.fileno())
        finally:
            commands.close()  # whatever happened here: the ranks' parent kills what is left, and ends
            status = fork_server.end(while_waiting=running.stopped.continue_parents)
    running.positions.update((rank, board.position(place)) for place, rank in enumerate(job.ranks))
    if len(running.codes) < job.num_processes:
        running.parent_status = status
        _await_ends(list(running.stopped.ranks.values()))
    return running


def _await_ends(pids: Sequence[int]) -> None:
    """Wait until ranks have ended that are killed with their parent: they must not write beside what comes next."""
    until = time.monotonic() + _ENDING_SECONDS
    while any(state_of(pid) and not is_ending(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(_POLL_ENDS_SECONDS)


def _end_of(running: RunningJob, folder: Path) -> JobEnd:
    """Return the end of a job whose ranks have all ended."""
    ranks = range(running.first_rank, running.first_rank + running.num_processes)
    outcomes = {rank: RankExit.read(folder, rank) for rank in ranks}
    return JobEnd(
        num_processes=running.num_processes,
        outcomes=outcomes,
        cause=_cause(running, outcomes),
        signals=tuple(running.signals),
        has_failed_rank=any(running.codes.values()),
        was_ended=running.was_ended,
        positions={rank: position for rank, position in running.positions.items() if position.pid},
    )


def _cause(running: RunningJob, outcomes: Mapping[int, RankExit | None]) -> RankExit | None:
    """Why the job has failed: the rank that did first or hung, or what was stopped while the others waited for it."""
    if running.hanging is not None and not running.signals:
        return running.hanging
    if running.parent_status is not None:
        return _lost_parent(running)
    cause = first_cause(running.codes, running.ended_at, outcomes)
    if cause is not None and running.hang is not None and running.stopped_cause is None and not running.signals:
        # It may have ended with the others, once these had told it that they have failed.
        missing = missing_rank(cause, outcomes)
        if missing in outcomes:  # else it is another host's, which has its own launcher
            text = f"the others have waited for it in vain. Rank {cause.rank} says: {cause.message}"
            return replace(cause, rank=missing, error=HANG, message=text, trace=[], is_weft_error=False)
    # A script's ranks may have saved and left as they were asked to, once the stopped one went on.
    failed = None if cause is None or cause.status == os.EX_TEMPFAIL else cause
    if running.stopped_cause is None or running.signals or not (failed is None or is_secondary_or_timeout(failed)):
        return cause
    return RankExit(
        rank=running.stopped_rank,
        host=socket.gethostname(),
        when=time.monotonic(),
        error=signal.SIGSTOP.name,
        message=running.stopped_cause,
        status=1 if failed is None else failed.status,
    )


def _lost_parent(running: RunningJob) -> RankExit:
    """The process that started the ranks was killed, and they ended with it."""
    return RankExit(
        rank=next(rank for rank in itertools.count(running.first_rank) if rank not in running.codes),
        host=socket.gethostname(),
        when=time.monotonic(),
        error=PARENT_LOST,
        message=(
            f"the process that started the ranks ended with status {running.parent_status} before they did; they ended"
            " with it. When nobody killed it, the machine was short of memory: start fewer than"
            f" {running.num_processes} processes."
        ),
        status=1,
    )
