"""Start ranks on this machine from a warm parent, pass signals on, and report how they ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import weft.errors
from weft.config.plan import COLLECTIVE_TIMEOUT_SECONDS
from weft.errors import LaunchError, WeftError
from weft.events import FailureEvent, LogSink, MetricsSink, Run, RunFolder, Sink, WarningEvent, WarningSink
from weft.run.launch._cells import parameters_fit, pieces_of
from weft.run.launch._fork_server import ForkServer as ForkServer
from weft.run.launch._fork_server import open_fork_server as open_fork_server
from weft.run.launch._fork_server_main import END
from weft.run.launch._job import LaunchJob, RankOutcome
from weft.run.launch._rank_info import run_folder_note
from weft.run.launch._report import first_cause, is_late, report
from weft.run.launch._stopped import LOOK_SECONDS, StoppedProcesses

_ECHO_SECONDS = 1.0
"""How long the others may take to notice by themselves that one has failed, before they are told to end."""


class RankError(LaunchError):
    """A rank stopped with an error that is none of Weft's; its text is the whole report."""

    def __init__(self, text: str, *, rank: int, host: str, kind: str, status: int = 1) -> None:
        super().__init__(text, status=status)
        self.rank = rank
        self.host = host
        self.kind = kind
        """Type of the rank's exception, or how it died."""


@dataclass(slots=True)
class _Watch:
    """What the launcher knows of a running job."""

    commands: BinaryIO
    num_processes: int
    stopped: StoppedProcesses
    codes: dict[int, int] = field(default_factory=dict[int, int])
    """Rank → exit code; negative: the signal that killed it."""
    ended_at: dict[int, float] = field(default_factory=dict[int, float])
    signals: list[signal.Signals] = field(default_factory=list[signal.Signals])
    stopped_cause: str | None = None
    """Report of what was stopped when the first rank failed, or for too long."""
    stopped_rank: int = 0

    def hear(self, line: bytes) -> None:
        """Take up what the ranks' parent says: a process that is there, or a rank that has ended."""
        rank, *rest = line.split()
        if len(rest) == 1:
            self.stopped.started(int(rank), int(rest[0]))
            return
        self.stopped.ended(int(rank))
        self.codes[int(rank)], self.ended_at[int(rank)] = int(rest[0]), float(rest[1])

    def note_cause(self) -> None:
        """Remember what is stopped now, at the first failure."""
        if self.stopped_cause is None and (cause := self.stopped.cause()) is not None:
            self.stopped_cause, self.stopped_rank = cause, self.stopped.rank_of_cause()

    def pass_on(self, number: int, _frame: object = None) -> None:
        """Pass a signal to every rank; the second one kills."""
        self.signals.append(signal.Signals(number))
        self.order(number if len(self.signals) == 1 else signal.SIGKILL)
        self.order(signal.SIGCONT)  # a rank that is stopped would not notice

    def order(self, number: int) -> None:
        if not self.commands.closed:
            with contextlib.suppress(BrokenPipeError):  # the ranks' parent has just ended: nobody is left to be told
                self.commands.write(bytes([number]))


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
    once; a second one kills them.  Ranks never outlive this process.

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
    return _results(job, fork_server, stopped_timeout_seconds, meanwhile)


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
    pieces = [[piece.file, piece.line, piece.source] for piece in pieces_of(function)]
    parameters_fit(function, arguments)
    told = {"pieces": pieces, "arguments": dict(arguments)}
    preload = ("weft.api",)
    job = _job("cells", function.__name__, told, num_processes, threads_per_rank, None, None, preload)
    return _results(job, fork_server, stopped_timeout_seconds, is_users=True)


def _results(
    job: LaunchJob,
    fork_server: ForkServer | None,
    stopped_timeout_seconds: float,
    meanwhile: Callable[[], object] | None = None,
    *,
    is_users: bool = False,
) -> list[Any]:
    """Run a job, and return what each rank's function returned.  `is_users`: the function is of the user's own, whose
    lines are shown with every error."""
    num_processes = job.num_processes
    with _private_folder() as folder, _LauncherRun(folder, WarningSink()) as run:
        watch = _run(job, folder, fork_server, stopped_timeout_seconds, run, meanwhile)
        outcomes = {rank: RankOutcome.read(folder, rank) for rank in range(num_processes)}
        cause = _cause(watch, outcomes)
        if cause is not None and not watch.signals:
            run.fail_with(cause, num_processes, None)
    _raise_cause(watch, cause, outcomes, is_users=is_users)
    return [outcome.value for rank in range(num_processes) if (outcome := outcomes[rank]) is not None]


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
    if not module and not Path(script).is_file():
        raise LaunchError(f"there is no script {script} (in {os.getcwd()}). Give the path of a Python file.")
    if not script:
        raise LaunchError("the name of the module is empty. Give one that `python -m` would take.")
    kind = "module" if module or under else "script"
    words = [*(["-m"] if under and module else []), *([script] if under else []), *arguments]
    job = _job(kind, under or script, words, num_processes, threads_per_rank, logs, None)
    with _private_folder() as folder, _LauncherRun(folder, WarningSink(failures=True)) as run:
        watch = _run(job, folder, None, COLLECTIVE_TIMEOUT_SECONDS, run)
        if watch.signals and any(watch.codes.values()):
            return 128 + watch.signals[0]
        outcomes = {rank: RankOutcome.read(folder, rank) for rank in range(num_processes)}
        cause = _cause(watch, outcomes)
        if cause is None:
            return 0
        run.fail_with(cause, num_processes, logs)
        return cause.status


class _LauncherRun(Run):
    """What the launcher says of a job: on the terminal, and in the folder of the run once the ranks have named it."""

    def __init__(self, folder: Path, terminal: Sink) -> None:
        super().__init__(None, [terminal])
        self._note = run_folder_note(folder)
        self._run_folder: RunFolder | None = None

    def warn(self, text: str) -> None:
        """Say what the user should know, while ranks run."""
        self._find_folder()
        self.emit(WarningEvent(text=text, source="weft.run.launch"))

    def fail_with(self, cause: RankOutcome, num_processes: int, logs: Path | None) -> None:
        """Say why the job has ended, after all ranks have: its metrics have no other writer any more."""
        self._find_folder()
        if self._run_folder is not None:
            self.attach(MetricsSink(self._run_folder.metrics))
        text = cause.message if cause.error == signal.SIGSTOP.name else report(cause, num_processes, logs)
        if self._run_folder is not None and (further := self._run_folder.how_to_go_on()):
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
) -> _Watch:
    """Run the job to the end of its last rank."""
    job.write(folder)
    with contextlib.ExitStack() as stack:
        theirs, commands, events, reports = (
            stack.enter_context(os.fdopen(end, mode, buffering=0))
            for end, mode in zip((*os.pipe(), *os.pipe()), ("rb", "wb", "rb", "wb"), strict=True)
        )
        watch = _Watch(commands, job.num_processes, StoppedProcesses(stopped_timeout_seconds, run.warn))
        if meanwhile is None:
            stack.enter_context(_signals_passed_on(watch))
        if fork_server is None:
            new = ForkServer(threads_per_rank=job.threads_per_rank, import_path=job.import_path)
            fork_server = stack.enter_context(new)
        watch.stopped.fork_server = fork_server.pid
        fork_server.begin(folder, theirs.fileno(), reports.fileno())
        theirs.close()
        reports.close()
        try:
            if meanwhile is not None:
                meanwhile()  # Ctrl-C interrupts it as it would without ranks, and these end below
                stack.enter_context(_signals_passed_on(watch))
            _follow(watch, events.fileno())
        finally:
            commands.close()  # whatever happened here: the ranks' parent kills what is left, and ends
            status = fork_server.end(while_waiting=watch.stopped.continue_helpers)
    if len(watch.codes) < job.num_processes:
        raise LaunchError(
            f"the process that started the ranks ended with status {status} before they did; they ended with it. "
            f"When nobody killed it, the machine was short of memory: start fewer than {job.num_processes} processes."
        )
    return watch


@contextlib.contextmanager
def _signals_passed_on(watch: _Watch) -> Generator[None]:
    """Pass SIGINT and SIGTERM on while ranks run; outside the main thread Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, watch.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(watch: _Watch, events: int) -> None:
    """Read which rank ended how, until all have or the fork server is gone; after a failure, end the others."""
    deadline: float | None = None
    told_to_end = False
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while len(watch.codes) < watch.num_processes:
            # The pipe wakes this process at once when a rank ends; between times it looks for ranks that are stopped.
            wait = LOOK_SECONDS if deadline is None else max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))
            if selector.select(wait):
                data = os.read(events, 65536)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    watch.hear(line)
            elif deadline is not None and time.monotonic() >= deadline:
                watch.order(END)
                deadline, told_to_end = None, True
            elif not told_to_end:
                watch.stopped.look()
            has_failed = any(watch.codes.values())
            # The other ranks get a moment: a rank that fails by itself may still be the first cause, and says more than
            # one that was ended.
            if deadline is None and not told_to_end and (has_failed or watch.stopped.has_waited_enough):
                watch.note_cause()
                deadline = time.monotonic() + (_ECHO_SECONDS if has_failed else 0.0)


def _cause(watch: _Watch, outcomes: Mapping[int, RankOutcome | None]) -> RankOutcome | None:
    """Why the job has failed: the rank that did first, or what was stopped while the others waited for it."""
    cause = first_cause(watch.codes, watch.ended_at, outcomes)
    if watch.stopped_cause is None or watch.signals or not (cause is None or is_late(cause)):
        return cause
    return RankOutcome(
        rank=watch.stopped_rank,
        host=socket.gethostname(),
        when=time.monotonic(),
        error=signal.SIGSTOP.name,
        message=watch.stopped_cause,
        status=1 if cause is None else cause.status,
    )


def _raise_cause(
    watch: _Watch, cause: RankOutcome | None, outcomes: Mapping[int, RankOutcome | None], *, is_users: bool
) -> None:
    if signal.SIGINT in watch.signals and any(watch.codes.values()):
        raise KeyboardInterrupt
    if cause is None:
        return
    if cause.error == signal.SIGSTOP.name:
        raise RankError(cause.message, rank=cause.rank, host=cause.host, kind=cause.error)
    if watch.signals:
        raise RankError(
            f"stopped by {watch.signals[0].name} before a step could be finished and saved.",
            rank=cause.rank,
            host=cause.host,
            kind=watch.signals[0].name,
            status=128 + watch.signals[0],
        )
    if is_users or not cause.family:
        raise RankError(
            report(cause, watch.num_processes, None),
            rank=cause.rank,
            host=cause.host,
            kind=cause.error or "died",
            status=cause.family_status if cause.family else 1,
        )
    kind = getattr(weft.errors, cause.error or "", WeftError)
    everywhere = all(outcome is not None and outcome.message == cause.message for outcome in outcomes.values())
    message = cause.message if everywhere else f"rank {cause.rank} on host {cause.host}: {cause.message}"
    raise kind(message, status=cause.family_status)
