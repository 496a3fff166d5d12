"""Saves that last in an object store: from memory, or from the run's folder, by the supervisor's process.

    rank 0 … n ── save ──►  memory/step-000120/  ── drain ──►  s3://bucket/prefix/<run>/step-000120/
                  (without room, and at the end of a run)  runs/<run>/checkpoints/step-000121/  ── drain ──►  …

A store that is away does not stop a run: the save stays where it is, the failure is said, and it is tried again, with
the next save and between saves.  At the end of a run what could not be sent goes to the run's folder.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import CheckpointError, WeftError
from weft.events import Owned
from weft.run.checkpoint._checkpointer import KEEP, newest_saved_step
from weft.run.checkpoint._folder import LATEST, CompleteCheckpoint, complete_checkpoints
from weft.run.checkpoint._read import StoredCheckpoint
from weft.run.checkpoint.store import CheckpointStore
from weft.run.checkpoint.tiers import DiskFolder, Drain, free_memory_bytes
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder

logger = logging.getLogger(__name__)

_LOOK_AT_DISK_SECONDS = 1.0
_WAIT_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0, 60.0)
"""Seconds between tries after one has failed; behind the last, the next save is waited for."""
_WAIT_AT_END_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between tries to send the last save of a run."""


@dataclass(slots=True)
class StoreSaves:
    """What a run keeps in a store, seen from the supervisor."""

    store: CheckpointStore
    memory: Path
    """Folder in memory for saves of the ranks."""
    checkpoints: Path
    """The run's folder of checkpoints, on the disk."""

    def begin(self, *, resumes: bool) -> None:
        """Make sure that the run may save there.

        Raises:
            CheckpointError: the store cannot be used, or holds saves of another run.
        """
        self.store.claim(goes_on=resumes)

    def bring_newest(self) -> None:
        """Before ranks go on: bring the newest save to this host, where it is in the store alone.  What was damaged in
        memory is removed, so that it does not stand before a sound one.

        Raises:
            CheckpointError: nothing can be gone on with.
        """
        for save in complete_checkpoints(self.memory):
            try:
                StoredCheckpoint(save.path).verify()
            except CheckpointError as problem:
                logger.warning("the save in memory is passed over: %s", problem)
                shutil.rmtree(save.path)
        local = max(newest_saved_step(self.memory), newest_saved_step(self.checkpoints))
        try:
            saves = self.store.complete()
            if saves and saves[0].manifest.step > local:
                fits = 2 * saves[0].num_bytes < free_memory_bytes()
                self.store.fetch_newest(self.memory if fits else self.checkpoints)
        except CheckpointError as problem:
            if not local:
                raise
            logger.warning("the run goes on from its own save of step %d: %s", local, problem)


class StoreDrain(Drain):
    """Copies saves from memory and from the run's folder to the store, and tries again what has failed."""

    def __init__(self, memory: Path, store: CheckpointStore, checkpoints: Path) -> None:
        super().__init__(memory, _Tried(store), name=store.url)
        self._store = store
        self._checkpoints = checkpoints
        self._looked = time.monotonic()
        self._seen_on_disk = self._disk_changed()

    def look(self) -> None:
        """Copy what has been asked for since the last look, what has been saved on the disk, and what has failed."""
        super().look()
        if time.monotonic() - self._looked < _LOOK_AT_DISK_SECONDS:
            return
        self._looked = time.monotonic()
        changed = self._disk_changed()
        if changed != self._seen_on_disk or self._tried.is_due():
            self._seen_on_disk = changed
            self.send_newest()  # a failure has been said once, and is tried again

    def send_newest(self) -> str:
        """Send the newest save of this host, if it is newer than what lies in the store.  Return why that failed, or an
        empty text."""
        newest = self._newest_here()
        try:
            if newest is not None and newest.manifest.step > self._store.newest_step():
                is_again = bool(self._tried.failures)
                self._tried.copy(newest.path)
                if is_again:
                    logger.warning(
                        "the checkpoint of step %d has reached %s now", newest.manifest.step, self._store.url
                    )
        except (WeftError, OSError) as problem:
            return str(problem)
        return ""

    def flush(self) -> bool:
        """Send the newest save, trying for a while: no rank runs any more.  What cannot be sent goes to the run's
        folder.  Return whether nothing is in memory alone."""
        problem = ""
        for seconds in (*_WAIT_AT_END_SECONDS, 0.0):
            if not (problem := self.send_newest()):
                return True
            time.sleep(seconds)
        logger.warning(
            "the newest save stays in %s, and going on with the run by --resume sends it: %s",
            self._checkpoints,
            problem,
        )
        return Drain(self._memory, DiskFolder(self._checkpoints, KEEP, self._store.owned)).flush()

    @property
    def _tried(self) -> _Tried:
        assert isinstance(self._destination, _Tried)
        return self._destination

    def _disk_changed(self) -> int:
        try:
            return (self._checkpoints / LATEST).stat().st_mtime_ns
        except OSError:
            return 0

    def _newest_here(self) -> CompleteCheckpoint | None:
        saves = [*complete_checkpoints(self._memory)[:1], *complete_checkpoints(self._checkpoints)[:1]]
        return max(saves, key=lambda save: save.manifest.step, default=None)


@dataclass(slots=True)
class _Tried:
    """A store that notes which copies have failed, and when the next try is due."""

    store: CheckpointStore
    failures: list[float] = field(default_factory=list[float])
    """Monotonic times of failures since a copy has succeeded, or since the tries were used up."""

    def newest_step(self) -> int:
        with self._noted():
            return self.store.newest_step()

    def copy(self, checkpoint: Path) -> str:
        with self._noted():
            url = self.store.copy(checkpoint)
        self.failures.clear()
        return url

    @contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except (WeftError, OSError):
            self.failures.append(time.monotonic())
            raise

    def is_due(self) -> bool:
        """Whether something failed, and is to be tried again now."""
        if not 0 < len(self.failures) <= len(_WAIT_SECONDS):
            return False
        return time.monotonic() - self.failures[-1] >= _WAIT_SECONDS[len(self.failures) - 1]


@contextmanager
def saves_in_store(url: str, checkpoints: Path, owned: Owned | None) -> Generator[StoreSaves]:
    """Keep saves in memory, which outlive the ranks, and send to a store what shall last.  At the end the newest one
    lies there, or in the run's folder, whatever ended the run.

    Raises:
        CheckpointError: what reads such URLs is not installed.
    """
    store = CheckpointStore(url, keep=KEEP, owned=owned)
    # A host without memory file system gets a folder that no save fits into: ranks then save on the disk.
    memory = create_memory_folder() or Path(tempfile.mkdtemp(prefix="weft-saves-"))
    drain = StoreDrain(memory, store, checkpoints)
    try:
        with drain:
            yield StoreSaves(store, memory, checkpoints)
    finally:
        if drain.flush():
            with suppress(OSError):
                remove_memory_folder(memory)
        else:
            logger.warning(
                "the newest save lies in %s alone. Make room, and copy it to %s.", memory, checkpoints.parent
            )
