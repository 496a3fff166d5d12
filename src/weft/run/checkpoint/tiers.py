"""Saves that do not stop training: into the host's memory first, and from there to the disk by another process.

    rank 0 … n ── save ──►  memory/step-000120/   (tmpfs, the format of every checkpoint)
                                   │  drain: the supervisor's process copies it, digest by digest
                                   ▼
                            checkpoints/step-000120/

Training waits for the copy into memory alone.  The folder in memory belongs to the supervisor, so it outlives ranks
that are killed: the next generation goes on from the newest complete save in either tier.

Two files in memory are all that rank 0 and the supervisor say to one another:

    wanted.json     rank 0: which save shall reach the disk
    drained.json    the supervisor: which save did, or why it did not
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.config.document import Json
from weft.errors import WeftError
from weft.events import Owned
from weft.files import write_whole
from weft.process import unused_memory_bytes
from weft.run.checkpoint._checkpointer import (
    CheckpointChoice,
    Checkpointer,
    SaveError,
    ShardSelector,
    StateCheck,
    newest_saved_step,
)
from weft.run.checkpoint._folder import complete_checkpoints, remove_leftovers, step_name
from weft.run.checkpoint._peers import MAXIMUM, Peers
from weft.run.launch import FAILURE_SECONDS
from weft.techniques.core import CheckpointShard

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_WANTED, _DRAINED = "wanted.json", "drained.json"
_POLL_SECONDS = 0.02
_COPIES = 2
"""Saves that lie in memory while another is written: the newest complete one, and the new one."""
_SHARE_OF_MEMORY = 0.5
"""Share of the host's available memory that saves may take; more, and they go to the disk at once."""
_FIRST_SNAPSHOT_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A save that has reached the disk, or has not."""

    step: int
    number: int
    """Number that rank 0 has drawn for the save: one step may be saved more than once."""
    path: str
    """The checkpoint that lasts; the folder, or the URL, of all where it failed."""
    seconds: float
    """Time that the copy took, beside training."""
    problem: str = ""
    """Why it failed; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """State of a save at the moment when training goes on."""

    path: Path
    is_durable: bool
    """Whether it has reached the disk; else it lies in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A save in memory that rank 0 wants to last."""

    step: int
    number: int

    @classmethod
    def read(cls, memory: Path) -> _Wanted | None:
        """The one that was asked for last; None where none was."""
        values = _read_json(memory / _WANTED)
        return None if values is None else cls(step=int(values["step"]), number=int(values["number"]))


class TieredCheckpointer:
    """Saves into memory where there is room, and has what shall last copied to the disk.  Call every method on every
    rank alike, but `poll`."""

    def __init__(
        self,
        durable: Checkpointer,
        memory: Path | None,
        *,
        ranks_on_host: int,
        has_hosts: bool = False,
        failure_seconds: float = FAILURE_SECONDS,
    ) -> None:
        """Say where the tiers lie.

        Args:
            durable: the checkpoints on the disk.
            memory: the supervisor's folder in memory (`create_memory_folder`); None: every save goes to the disk.
            ranks_on_host: ranks that share the host's memory.
            failure_seconds: mean time between failures, for the interval of snapshots.
            has_hosts: whether the job has other hosts, which may be lost: snapshots go to the disk that all see.
        """
        self._has_hosts, self._failure_seconds = has_hosts, failure_seconds
        self._durable = durable
        self._peers: Peers = durable.peers
        self._folder = memory
        self._memory = (
            Checkpointer(memory, durable.peers, keep=1, provenance=durable.provenance) if memory is not None else None
        )
        self._ranks_on_host = ranks_on_host
        self._has_room: bool | None = None
        self._wanted: _Wanted | None = None
        """Save whose copy to the disk has been asked for and is not known to have ended."""
        self._seen = 0.0
        self._interval = _FIRST_SNAPSHOT_STEPS
        self.next_snapshot = 0
        """Finished steps after which the next snapshot is due; 0: none is."""

    @property
    def peers(self) -> Peers:
        """The ranks that save and load together."""
        return self._peers

    @property
    def folder(self) -> Path:
        """The folder of durable checkpoints."""
        return self._durable.folder

    def latest(self) -> Path | None:
        """Return the newest durable checkpoint.  No other rank is asked."""
        return self._durable.latest()

    def begin(self, step: int) -> None:
        """The loop begins after `step` finished steps: plan the first snapshot, and take over a copy to the disk that
        the generation before has asked for."""
        self.next_snapshot = step + _FIRST_SNAPSHOT_STEPS if self._memory is not None or self._has_hosts else 0
        if self._folder is not None and self._peers.rank == 0:
            wanted = _Wanted.read(self._folder)
            if wanted is not None and wanted.number != self._drained_number():
                self._wanted = wanted

    @property
    def wanted_step(self) -> int | None:
        """Step whose copy to the disk has been asked for and is not known to have ended; None on other ranks than 0."""
        return None if self._wanted is None else self._wanted.step

    def _drained_number(self) -> int | None:
        assert self._folder is not None
        drained = _read_json(self._folder / _DRAINED)
        return None if drained is None else int(drained["number"])

    def _has_ended(self) -> bool:
        """Whether the copy that was asked for last has ended.  Ask on rank 0 alone."""
        return self._wanted is None or self._drained_number() == self._wanted.number

    def load(
        self,
        which: CheckpointChoice,
        shards: Sequence[CheckpointShard] | ShardSelector,
        *,
        check: StateCheck | None = None,
    ) -> dict[str, Json]:
        """Load from the newest save of both tiers, or from the one given; see `Checkpointer.load`.

        A save in memory that is damaged is warned about, and the newest durable one is taken.
        """
        if self._memory is not None and not isinstance(which, Path):
            in_memory, on_disk = self._peers.minimum(
                [newest_saved_step(self._memory.folder), -newest_saved_step(self._durable.folder)]
            )
            if in_memory > -on_disk:
                try:
                    state = self._memory.load(which, shards, check=check)
                except WeftError as problem:  # on every rank alike: the ranks have agreed on it
                    if self._peers.rank == 0:
                        logger.warning("the save in memory is passed over: %s", problem)
                else:
                    self._durable.adopt()
                    return state
        return self._durable.load(which, shards, check=check)

    def save(self, step: int, shards: Sequence[CheckpointShard], state: Mapping[str, Json], *, at_once: bool) -> Saved:
        """Save all ranks' shards and rank 0's `state`, so that they last.

        Args:
            step: finished optimizer steps.
            shards: this rank's; each element of each tensor counts on exactly one rank.
            state: what is no tensor.
            at_once: return only when the save is on the disk: the run ends, or is asked to.

        Raises:
            SaveError: as from `Checkpointer.save`.
        """
        self._wait_for_drain()
        if at_once or not self._fits(shards):
            if self._has_hosts and self.next_snapshot:
                self.next_snapshot = step + self._interval
            return Saved(path=self._durable.save(step, shards, state), is_durable=True)
        self._durable.claim(step)
        if not self._saved_in_memory(step, shards, state):
            return Saved(path=self._durable.save(step, shards, state), is_durable=True)
        if not self._ask_for_copy(step):
            return Saved(path=self._durable.save(step, shards, state), is_durable=True)
        if self.next_snapshot:
            self.next_snapshot = step + self._interval
        return Saved(path=self._durable.folder / step_name(step), is_durable=False)

    def _ask_for_copy(self, step: int) -> bool:
        """Ask the supervisor to copy a save to the disk; return on every rank whether rank 0 could."""
        is_asked = True
        if self._peers.rank == 0:
            assert self._folder is not None
            wanted = _Wanted(step=step, number=secrets.randbits(61))
            try:
                write_whole(self._folder / _WANTED, json.dumps(asdict(wanted)))
            except OSError:  # not even a few bytes fit any more
                is_asked = False
            else:
                self._wanted = wanted
        return bool(self._peers.share(int(is_asked))[0])

    def snapshot(
        self, step: int, shards: Sequence[CheckpointShard], state: Mapping[str, Json], step_seconds: float
    ) -> Path | None:
        """Save against failures, and plan the next one: into memory only, where there is room; with several hosts to
        the disk.  Return the checkpoint on the disk; None: there is none.

        The interval is √(2 · mean time between failures · stall): J. W. Young, "A first order approximation to the
        optimum checkpoint interval", CACM 17(9), 1974.

        Args:
            step_seconds: time of a step of late, on this rank.

        Raises:
            SaveError: as from `Checkpointer.save`.
        """
        if self._is_draining():
            # A snapshot would take the place of the save that is being copied.
            self.next_snapshot = step + 1
            return None
        began, path = time.perf_counter(), None
        if self._has_hosts:
            self.next_snapshot = step + self._interval  # where this one fails, the next may not
            path = self._durable.save(step, shards, state)
        elif not self._fits(shards) or not self._saved_in_memory(step, shards, state):
            self.next_snapshot = 0
            return None
        stall = time.perf_counter() - began
        steps = (2 * self._failure_seconds * stall) ** 0.5 / max(step_seconds, 1e-6)
        (self._interval,) = self._peers.share(max(1, min(round(steps), MAXIMUM // 2)))
        self.next_snapshot = step + self._interval
        return path

    def poll(self) -> Drained | None:
        """Return a copy to the disk that has ended since this was asked last.  Call on rank 0 alone, between steps."""
        if self._wanted is None or self._folder is None:
            return None
        path = self._folder / _DRAINED
        try:
            changed = path.stat().st_mtime_ns
            if changed == self._seen:
                return None
            drained = Drained(**json.loads(path.read_text()))
        except OSError:
            return None
        self._seen = changed
        if drained.number == self._wanted.number:
            self._wanted = None
        return drained

    def _saved_in_memory(self, step: int, shards: Sequence[CheckpointShard], state: Mapping[str, Json]) -> bool:
        """Save into memory; where it is full after all, say so once, and use the disk from now on."""
        assert self._memory is not None
        try:
            self._memory.save(step, shards, state)
        except SaveError as problem:
            if not problem.training_can_continue:
                raise
            self._has_room, self.next_snapshot = False, 0
            if self._peers.rank == 0:
                logger.warning("saves go to the disk from now on, and training waits for them: %s", problem)
            return False
        return True

    def _fits(self, shards: Sequence[CheckpointShard]) -> bool:
        """Whether the host's memory has room for saves.  Asked once: ranks agree on it."""
        if self._has_room is None:
            own = sum(shard.tensor.nbytes for shard in shards if shard.counts)
            free = self._memory is not None and _COPIES * own * self._ranks_on_host < free_memory_bytes()
            self._has_room = bool(self._peers.minimum([int(free)])[0])
            if not self._has_room and not self._has_hosts:
                self.next_snapshot = 0
        return self._has_room

    def _is_draining(self) -> bool:
        """Whether a copy to the disk is under way, as rank 0 knows; the same on every rank."""
        # One that has ended is none, though `poll` has not said so yet.
        return bool(self._peers.share(int(self._peers.rank == 0 and not self._has_ended()))[0])

    def _wait_for_drain(self) -> None:
        """At most one copy to the disk is under way: rank 0 waits for it, and the others wait for rank 0."""
        if self._memory is None:
            return
        while self._peers.rank == 0 and not self._has_ended():
            time.sleep(_POLL_SECONDS)
        self._peers.share(0)


class Destination(Protocol):
    """Where saves last: what `Drain` copies them to."""

    def newest_step(self) -> int:
        """Return the finished steps of the newest save there; 0 where there is none."""
        ...

    def copy(self, checkpoint: Path) -> str:
        """Copy a checkpoint there, and return where it lies.  Raises `WeftError` or `OSError`."""
        ...


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A run's folder of checkpoints, as a destination."""

    path: Path
    keep: int
    """Newest checkpoints that stay."""
    owned: Owned | None
    """Asked before a copy gets its name, whether the folder is still this run's."""

    def newest_step(self) -> int:
        """Return the finished steps of the newest save there; 0 where there is none."""
        return newest_saved_step(self.path)

    def copy(self, checkpoint: Path) -> str:
        """Copy a checkpoint there, and return where it lies."""
        from weft.run.checkpoint._copy import copy_checkpoint  # the supervisor's: ranks copy nothing

        return str(copy_checkpoint(checkpoint, self.path, keep=self.keep, owned=self.owned))

    def tidy(self) -> None:
        """Remove what killed ranks have left unfinished; no rank runs any more."""
        with suppress(WeftError):  # the folder is another run's by now, and so is what lies in it
            if self.owned is not None:
                self.owned.check()
            remove_leftovers(self.path)


class Drain:
    """Copies saves from memory to where they last, in a thread of the supervisor's process.

    Use it as a context manager around one generation after another; leaving it ends the thread.
    """

    def __init__(self, memory: Path, destination: Destination, *, name: str = "the disk") -> None:
        """`name` is that of the destination, for messages."""
        self._memory = memory
        self._destination = destination
        self._name = name
        self._done = 0
        """Number of the save that was copied last."""
        self._unsaid: Drained | None = None
        """What could not be written down yet, because memory was full."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-drain", daemon=True)

    def __enter__(self) -> Drain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def flush(self) -> bool:
        """Let the newest save in memory reach its destination, if it is newer than what lies there: no rank runs any
        more.  Return whether nothing is in memory alone."""
        try:
            for newest in complete_checkpoints(self._memory)[:1]:
                if newest.manifest.step > self._destination.newest_step():
                    self._destination.copy(newest.path)
        except (WeftError, OSError) as error:
            logger.warning("the newest save did not reach %s: %s", self._name, error)
            return False
        return True

    def _run(self) -> None:
        # The copy has less right to a core than the ranks have.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while not self._ends.wait(_POLL_SECONDS):
            self.look()
        self.look()  # what was asked for just before the end

    def look(self) -> None:
        """Copy what has been asked for since the last look.  Called by the thread."""
        if self._unsaid is not None:
            self._say(self._unsaid)
        wanted = _Wanted.read(self._memory)
        if wanted is not None and wanted.number != self._done:
            self._done = wanted.number
            self._say(self._copied(wanted))

    def _say(self, drained: Drained) -> None:
        """Write down how a copy has ended, for rank 0, which may be waiting for it."""
        try:
            write_whole(self._memory / _DRAINED, json.dumps(asdict(drained)))
        except OSError:
            self._unsaid = drained
        else:
            self._unsaid = None

    def _copied(self, wanted: _Wanted) -> Drained:
        began = time.perf_counter()
        path, problem = self._name, ""
        try:
            path = self._destination.copy(self._memory / step_name(wanted.step))
        except (WeftError, OSError) as error:
            # Rank 0 says it; where no rank is left, the last try (`flush`) says what is wrong.
            problem = f"the checkpoint of step {wanted.step} did not reach {self._name}: {error}"
        seconds = time.perf_counter() - began
        return Drained(step=wanted.step, number=wanted.number, path=path, seconds=seconds, problem=problem)


def free_memory_bytes() -> float:
    """Bytes that saves may take: of the memory file system, and of what the host, or the control group, has left."""
    try:
        system = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0.0
    return min(system.f_bavail * system.f_frsize, _SHARE_OF_MEMORY * unused_memory_bytes())


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small file of a folder that only this user can enter; None where there is none yet."""
    try:
        return json.loads(path.read_text())
    except OSError:
        return None
