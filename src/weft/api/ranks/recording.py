"""Record a run: a session's folders, the one path that all ranks agree on, and a user's function."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import weft.errors
from weft.api.ranks.agreement import gather_texts
from weft.api.ranks.own_rings import open_rank_ring
from weft.api.ranks.supervision import SupervisedSession
from weft.comm.mesh import Mesh
from weft.config.plan import Plan, dump_plan
from weft.errors import LaunchError, WeftError
from weft.events import (
    Emitted,
    Event,
    FolderToken,
    Listening,
    OnEvent,
    Run,
    RunFolder,
    Track,
    loggers_to,
    sinks_of,
)
from weft.events.folder_lock import FolderLock
from weft.events.progress import ProgressRow
from weft.events.ring import RankRing
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.launch import RankInfo

logger = logging.getLogger(__name__)


def run_name(recipe: Path) -> str:
    """The name of a run of this recipe or script: the file's, or its folder's where the file is just called
    recipe.toml, or __main__.py as under `python -m`."""
    stem = recipe.resolve().parent.name if recipe.stem in ("recipe", "__main__") else recipe.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"


def create_folder(name: str, folder: str | Path | None) -> RunFolder:
    """Make the folder of a run: the one given, or `runs/<name>-<date>-<n>`.  Call on one rank.

    Raises:
        LaunchError: it cannot be made.
    """
    if folder is None:
        return RunFolder.create(Path("runs"), name)
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if os.path.isfile(path):
            raise LaunchError(f"{path} is a file, and a run needs a folder. Give another name.") from None
        raise LaunchError(
            f"the run folder {path} cannot be made: {error.strerror}. Give a folder that is writable."
        ) from None
    return RunFolder(path)


def folder_of_rank_0(make: Callable[[], RunFolder]) -> RunFolder:
    """Return on every rank the folder that rank 0 makes.  Call on every rank.

    Raises:
        WeftError: on every rank; what `make` raised on rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    text = ""
    if dist.get_rank() == 0:
        try:
            text = str(make().path.resolve())
        except WeftError as problem:
            text = f"{type(problem).__name__}:{problem}"
    text = gather_texts(text, torch.device("cpu"))[0]
    if text.startswith("/"):
        return RunFolder(Path(text))
    kind, _, problem = text.partition(":")
    raise getattr(weft.errors, kind, WeftError)(problem)


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The record of one prepared model's training."""

    folder: RunFolder
    run: Run
    lock: FolderLock | FolderToken
    progress: ProgressRow | None = None
    """Where the launcher reads how far the model's loop is; None: without a launcher, or for further models."""
    ring: RankRing | None = None
    """Where the run's collector reads what this rank does; None: nothing collects it, or for further models."""
    supervised: SupervisedSession | None = None
    """The session's part in a job that is started again; None where it is not, or for further models."""
    keeps_ledger: bool = False
    """Whether the samples of each step are written down."""

    def checkpointer(self, mesh: Mesh) -> Checkpointer:
        """Return the checkpointer of this run, where the folder is this session's. Call on every rank."""
        return Checkpointer(self.folder.checkpoints, Peers.of_group(mesh["world"]), owned=self.lock)

    def tiers(self, durable: Checkpointer) -> TieredCheckpointer | None:
        """Return what takes snapshots beside these, into the supervisor's memory, or for several hosts into the folder;
        None where there is no supervisor."""
        has_hosts = self.supervised is not None and self.supervised.token is not None
        if self.supervised is None or (self.supervised.memory is None and not has_hosts):
            return None
        return TieredCheckpointer(
            durable,
            self.supervised.memory,
            ranks_on_host=self.supervised.ranks_on_host,
            has_hosts=has_hosts,
            failure_seconds=self.supervised.failure_seconds,
        )


class SessionRuns:
    """A session's folder, laid out as that of `weft train`, with one below it for each model after the first.

    It is made, and locked, when the first model is prepared.  Without `record` nothing is written here: the first save
    locks it.
    """

    def __init__(
        self,
        folder: Path | None,
        rank_info: RankInfo,
        *,
        record: bool,
        keeps_ledger: bool = False,
        track: Track | None = None,
        on_event: OnEvent | None = None,
        supervised: SupervisedSession | None = None,
    ) -> None:
        self._given = folder
        self.keeps_ledger = keeps_ledger
        self.supervised = supervised
        """The session's part in a job that is started again; None where it is not."""
        self._track, self._on_event = track, on_event
        self._callbacks: list[Callback] = []
        self._rank_info = rank_info
        self._rank = rank_info.rank
        self._record = record
        self._folder: RunFolder | None = None
        self._lock: FolderLock | FolderToken | None = None
        self._note = ""
        self._runs: list[Run] = []
        self._stack = ExitStack()

    def open(self, number: int, plan: Plan) -> ModelRun:
        """Begin the record of the session's model `number`, from 1.  Call on every rank.

        Raises:
            LaunchError: on every rank; the folder cannot be made, or is another's.
        """
        own = folder_of_rank_0(lambda: self._create(number, plan))
        self._folder = self._folder if self._folder is not None else own
        lock = self._lock_of(self._folder, plan)
        if self._record:
            with suppress(OSError):  # of other hosts, where they share no files; the log counts what it loses
                own.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._rank == 0:
                self._rank_info.report_run_folder(self._folder.path)
        listening = Listening(
            rank=self._rank,
            folder=self._folder if self._record else None,
            model_folder=own if self._record else None,
            owner=lock,
            track=self._track,
            track_prefix=f"model-{number}/" if number > 1 else "",
        )
        run = self._stack.enter_context(Run(self._rank, list(sinks_of(listening))))
        if number == 1:
            self._stack.enter_context(loggers_to(run, all_of_process=False))
        if self._note:
            logger.warning("%s", self._note)
            self._note = ""
        self._runs.append(run)
        if number == 1:
            given = self.supervised
            return ModelRun(
                own,
                self._called(run, number),
                lock,
                self._rank_info.progress_row() if given is None else given.progress(),
                self._ring(),
                given if self._record else None,
                self.keeps_ledger,
            )
        if self.supervised is not None:
            self.supervised.prepared_another()
        return ModelRun(own, self._called(run, number), lock, keeps_ledger=self.keeps_ledger)

    def _lock_of(self, folder: RunFolder, plan: Plan) -> FolderLock | FolderToken:
        """The lock of the session's folder, which only rank 0 takes; or the token of who owns it for this job."""
        if self._lock is None and self.supervised is not None:
            self._lock = self.supervised.token
        if self._lock is None:
            self._lock = FolderLock(folder.path, silent_seconds=2 * plan.compute.timeout_seconds)
            self._stack.callback(self._lock.release)
        return self._lock

    def _ring(self) -> RankRing | None:
        """The ring of this rank, for the session's first model; None where nothing is recorded."""
        assert self._folder is not None
        if not self._record:
            return None
        return open_rank_ring(self._rank_info, self._folder.path, self._stack)

    def _called(self, run: Run, number: int) -> Run:
        """A run whose events the user's function hears, where there is one."""
        if self._on_event is None:
            return run
        callback = Callback(self._on_event, number)
        run.attach(callback)
        self._callbacks.append(callback)
        return CalledRun(run, callback)

    def tell_failure(self) -> None:
        """Call the user's function with the failure, too."""
        for callback in self._callbacks:
            callback.deliver_last()

    def fail(self, error: BaseException) -> None:
        """Record the error that this rank leaves with."""
        for run in self._runs[:1]:
            run.fail(error)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def _create(self, number: int, plan: Plan) -> RunFolder:
        """Make the folder of a model, with its plan; only on rank 0."""
        folder_name = self._given
        if not self._record:
            folder = folder_name if folder_name is not None else Path("runs") / "session"
            return RunFolder(folder / f"model-{number}" if number > 1 else folder)
        if self._folder is not None:
            folder_name = self._folder.path / f"model-{number}"
        script = Path(sys.argv[0])
        own = create_folder(run_name(script) if script.suffix == ".py" else "session", folder_name)
        if self._folder is None:
            lock = self._lock_of(own, plan)
            note = lock.acquire() if isinstance(lock, FolderLock) else ""
            # A generation takes the folder over from the one before, and its supervisor has said so.
            self._note = "" if self.supervised is not None and self.supervised.goes_on else note
        try:
            own.plan.write_text(dump_plan(plan))
        except OSError as error:
            raise LaunchError(
                f"the session cannot be recorded in {own.path}: {error.strerror}. Give a folder that is writable, or"
                " write weft.session(record=False)."
            ) from None
        return own


class Callback:
    """A sink that keeps the events of one model's run for a user's function until somebody calls `deliver`, where the
    loop stands and not where the event was said."""

    def __init__(self, on_event: OnEvent, model: int) -> None:
        self._on_event, self._model = on_event, model
        self._waiting: deque[Event] = deque()
        self._is_delivering = False

    def take(self, emitted: Emitted) -> None:
        """See `Sink`.  From any thread, also in the middle of a collective call."""
        self._waiting.append(emitted.event)

    def close(self) -> None:
        """Nothing is held."""

    def deliver(self) -> None:
        """Call the function with what is waiting, in its order.  What it does itself is told after it; what it raises
        is raised here, and the rest goes on waiting."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._waiting:
                self._on_event(self._waiting.popleft(), self._model)
        finally:
            self._is_delivering = False

    def deliver_last(self) -> None:
        """`deliver` on the way out by an error, which is the one to be seen: what the function raises is a warning."""
        while self._waiting:
            try:
                self.deliver()
            except Exception as problem:
                with suppress(Warning):  # of a user who turns them into errors
                    text = f"on_event raised {type(problem).__name__}: {problem}, while the session ended by an error."
                    warnings.warn(text, stacklevel=2)


class CalledRun(Run):
    """A run for a state that replaces another one; its callback first hears what has been recorded so far."""

    def __init__(self, run: Run, callback: Callback) -> None:
        super().__init__(run.rank)
        self._run, self._callback = run, callback

    def emit(self, event: Event) -> None:
        """Emit an event, and call the user's function; its errors are raised."""
        self._run.emit(event)
        self._callback.deliver()
