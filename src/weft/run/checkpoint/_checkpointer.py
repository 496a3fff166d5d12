"""Saving and loading by all ranks of a job: all of them succeed, or none does and the previous checkpoint stays."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import torch

from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError, WeftError
from weft.events import Owned
from weft.run.checkpoint import _folder
from weft.run.checkpoint._commit import commit, create_partial, partial_path, remove_partial, tidy
from weft.run.checkpoint._format import ADVICE, MANIFEST, Manifest
from weft.run.checkpoint._peers import Peers
from weft.run.checkpoint._read import StoredCheckpoint
from weft.run.checkpoint._write import check_ranks, write_rank
from weft.techniques.core import CheckpointShard

logger = logging.getLogger(__name__)

KEEP = 2
"""Newest checkpoints that a folder keeps."""
CheckpointChoice = Literal["latest"] | Path
StateCheck = Callable[[JsonObject, int], object]
"""Looks at the state and the step of a checkpoint's manifest; raises `CheckpointError` if they are no good."""

ShardSelector = Callable[[StoredCheckpoint], Sequence[CheckpointShard]]
"""Returns the shards that are to be filled from a verified checkpoint."""


class SaveError(CheckpointError):
    """A save failed on some rank.  Every rank raises it with the same text, and nothing of the save remains."""

    def __init__(self, message: str, *, step: int, training_can_continue: bool, status: int = 2) -> None:
        super().__init__(message, status=status)
        self.step = step
        self.training_can_continue = training_can_continue
        """True when only the saving failed (disk full, not writable); False when the state itself is unsound."""


def newest_saved_step(folder: Path) -> int:
    """Return the finished steps of the newest checkpoint in a folder whose manifest is sound; 0 where there is none."""
    complete = _folder.complete_checkpoints(folder)
    return complete[0].manifest.step if complete else 0


class Checkpointer:
    """Writes and reads the checkpoints in one folder.  `save` and `load` are called on every rank alike.

    A checkpoint says nothing about the plan that wrote it, so any plan loads it; see `CheckpointShard`.
    """

    def __init__(
        self,
        folder: Path,
        peers: Peers | None = None,
        *,
        keep: int = KEEP,
        file_bytes: int = 1 << 30,
        provenance: Mapping[str, str] | None = None,
        owned: Owned | None = None,
    ) -> None:
        """Say where checkpoints lie.  Nothing is touched yet.

        Args:
            folder: made by the first save.
            peers: the ranks that save and load together; by default this process alone.
            keep: newest checkpoints to keep.
            file_bytes: bytes of tensors in one file, at most.
            provenance: written into each manifest: run, digests of recipe and plan, versions of the code.
            owned: asked on rank 0 before a save begins and before it takes its name, whether the folder is still this
                run's.  Then saves of an earlier run are added to only after one of them was loaded.
        """
        if keep < 1:
            raise CheckpointError(f"keep = {keep} would remove every checkpoint. Keep at least 1.")
        self.folder = folder
        self.peers = peers if peers is not None else Peers()
        self.keep = keep
        self.file_bytes = file_bytes
        self.provenance = {"torch": torch.__version__, **(provenance or {})}
        self._owned = owned
        self._goes_on = owned is None

    def latest(self) -> Path | None:
        """Return the newest checkpoint with a sound manifest as this rank sees the folder.  No other rank is asked."""
        complete = _folder.complete_checkpoints(self.folder)
        return complete[0].path if complete else None

    def earlier(self) -> Path | None:
        """Return the newest save of an earlier run, which this one has not loaded and would remove; None where it may
        save.  No other rank is asked."""
        return None if self._goes_on else self.latest()

    def adopt(self) -> None:
        """Go on with the saves in the folder: this run has loaded one that was made after them."""
        self._goes_on = True

    def claim(self, step: int) -> None:
        """Make sure that this run may add to the folder, where another process will.  Call on every rank.

        Raises:
            SaveError: on every rank: the folder is another run's, or holds what this run neither saved nor loaded.
        """
        with self._together(step):
            if self.peers.rank == 0:
                self._check_owned()
        self._goes_on = True

    def save(self, step: int, shards: Sequence[CheckpointShard], state: Mapping[str, Json] | None = None) -> Path:
        """Save all ranks' shards and rank 0's `state`, then remove old checkpoints.  Call on every rank.

        Args:
            step: finished optimizer steps.
            shards: this rank's; each element of each tensor counts on exactly one rank.
            state: what is no tensor (data cursor, randomness, schedule); must be JSON without NaN and infinity.

        Raises:
            SaveError: on every rank, when any of them could not write; the previous checkpoints are as they were.
        """
        # All ranks write into one partial folder, whose name rank 0 draws: a save that died leaves a folder that no
        # later one can take for its own.  61 bits, because agreement is by int64 and must stay below `MAXIMUM`.
        token = f"{self.peers.share(secrets.randbits(61))[0]:016x}"
        partial = partial_path(self.folder, step, token)
        first = self.peers.rank == 0
        # Three phases, and an agreement after each: no rank writes before the folder is there, nothing is committed
        # before all ranks have written, and all ranks raise the same error if one of them fails.
        try:
            with self._together(step):
                if first:
                    self._check_owned()
                    _folder.remove_leftovers(self.folder)
                    create_partial(self.folder, step, token)
            with self._together(step):
                write_rank(partial, self.peers.rank, shards, self.file_bytes)
            with self._together(step):
                if first:
                    self._commit(partial, step, token, state or {})
        except SaveError:
            if first and partial.exists():
                remove_partial(partial)
            raise
        self._goes_on = True
        # Old checkpoints are removed only now, after the new one is durable, so that one is complete at every moment.
        if first:
            tidy(self.folder, step, token, self.keep)
        return self.folder / _folder.step_name(step)

    def load(
        self,
        which: CheckpointChoice,
        shards: Sequence[CheckpointShard] | ShardSelector,
        *,
        check: StateCheck | None = None,
    ) -> dict[str, Json]:
        """Verify a checkpoint, fill the shards from it and return the state saved with it.  Call on every rank.

        Every file is verified before the first tensor changes, the ranks sharing the work.  A damaged "latest" is
        warned about and the next older one is taken; a damaged checkpoint given by path is an error.

        Args:
            which: "latest", or the same path on every rank (of a checkpoint, or of a run).
            shards: everything this rank holds, whether it counts or not; or what returns that for a sound checkpoint.
            check: looks at the state before anything changes; what it refuses counts as damaged.

        Raises:
            CheckpointError: on every rank: there is none, it is damaged, or it does not fit the shards.
        """
        stored = self.open(which, check)
        self.fill([(stored, shards(stored) if callable(shards) else shards)])
        self._goes_on = self._goes_on or stored.folder.resolve().parent == self.folder.resolve()
        return dict(stored.manifest.state)

    def open(self, which: CheckpointChoice, check: StateCheck | None = None) -> StoredCheckpoint:
        """Verify a checkpoint and return it; see `load`."""
        return self._open_path(which, check) if isinstance(which, Path) else self._open_newest(check)

    def fill(self, parts: Sequence[tuple[StoredCheckpoint, Sequence[CheckpointShard]]]) -> None:
        """Fill shards from (parts of) verified checkpoints: all of them, or none where one does not fit.

        Raises:
            CheckpointError: on every rank.
        """
        from weft.run.checkpoint._match import match
        from weft.run.checkpoint._plan_state import fill_plan_state  # loaded where a checkpoint is

        # Every part is matched before the first tensor changes: a training that cannot load goes on as it was.
        matched = [match(stored, shards, self.peers) for stored, shards in parts]
        with torch.no_grad():
            for (stored, shards), by_name in zip(parts, matched, strict=True):
                for name, group in by_name.items():
                    stored.fill(name, group)
                    for shard in group:
                        if shard.let_go is not None:
                            shard.let_go()
                fill_plan_state(stored, shards, self.peers)

    def _check_owned(self) -> None:
        """Refuse a folder that is another's, or holds what this run neither saved nor loaded."""
        if self._owned is not None:
            self._owned.check()
        if (earlier := self.earlier()) is not None:
            raise CheckpointError(
                f"{self.folder} holds saves of an earlier run (the newest: {earlier.name}), and this run began anew: it"
                " would remove them. Load one before the first step to go on with it, or give another folder."
            )

    def _commit(self, partial: Path, step: int, token: str, state: Mapping[str, Json]) -> None:
        complete = _folder.complete_checkpoints(self.folder)
        manifest = Manifest(
            step=step,
            # The step does not say which checkpoint is newest: a run that goes on from an earlier one saves it again.
            sequence=max((one.manifest.sequence for one in complete), default=0) + 1,
            token=token,
            world=self.peers.world,
            provenance=self.provenance,
            state=state,
            indexes=check_ranks(partial, self.peers.world),
        )
        commit(self.folder, partial, manifest, lambda: self._owned is None or self._owned.check())

    @contextlib.contextmanager
    def _together(self, step: int) -> Generator[None]:
        """Let every rank finish its part, then raise on all of them if one failed.  A defect is re-raised as itself."""
        problem, defect, sound, defects = None, None, True, 0
        try:
            yield
        except OSError as error:
            problem = self._no_room(error)
        except WeftError as error:
            problem, sound = str(error), False
        except Exception as error:
            problem, defect, sound, defects = f"{type(error).__name__}: {error}", error, False, -1
        # Two agreements on every path, with an error or without: ranks must make the same calls in the same order.
        is_sound, defects = self.peers.minimum([int(sound), defects])
        is_mine = problem is not None
        problem = self.peers.first_problem(problem)
        if problem is not None:
            text = f"the checkpoint of step {step} was not saved: {problem} Earlier checkpoints are as they were."
            if defects and not is_mine:
                text = f"another rank failed, so this one could not go on: {text}"
            # What nobody foresaw is no input that a user could mend: the ranks may start again.
            status = 1 if defects else 2
            raise SaveError(text, step=step, training_can_continue=is_sound == 1, status=status) from defect

    def _no_room(self, error: OSError) -> str:
        where = error.filename or self.folder
        free = _folder.free_bytes(self.folder)
        return (
            f"{error.strerror or error} ({where}; {free / 1e9:.2f} GB free). "
            f"Make room, give another folder, or keep fewer than {self.keep} checkpoints."
        )

    def _open_path(self, path: Path, check: StateCheck | None) -> StoredCheckpoint:
        stored, problem = self._open_verified(path, check)
        if stored is None:
            raise CheckpointError(problem)
        return stored

    def _open_newest(self, check: StateCheck | None) -> StoredCheckpoint:
        """Open what rank 0 names, from the newest on, until all ranks find their share of it sound."""
        complete = _folder.complete_checkpoints(self.folder)
        problems = list[str]()
        for number in range(self.peers.share(len(complete))[0]):
            mine = complete[number].manifest if self.peers.rank == 0 else None
            token, step = self.peers.share(*((int(mine.token, 16), mine.step) if mine is not None else (0, 0)))
            # Looked for by token: on a file system whose ranks see different states, names and order may differ.
            same = [one.path for one in complete if (int(one.manifest.token, 16), one.manifest.step) == (token, step)]
            stored, problem = self._open_verified(same[0] if same else None, check)
            if stored is not None:
                if problems and self.peers.rank == 0:
                    logger.warning("loading %s instead, because %s", stored.folder, " ".join(problems))
                return stored
            problems.append(problem)
        reason = " ".join(problems) or '"latest" was asked for and no save has finished there.'
        raise CheckpointError(f"{self.folder} holds no checkpoint that can be loaded: {reason}")

    def _open_verified(self, path: Path | None, check: StateCheck | None) -> tuple[StoredCheckpoint | None, str]:
        """Open on every rank, each verifying its share of the files.  Else returns None and the first problem."""
        stored, problem = None, None
        try:
            if path is None:
                raise CheckpointError(f"{self.folder} looks different from here than on rank 0. Is it a shared folder?")
            stored = StoredCheckpoint(_folder.find_checkpoint(path))
            if check is not None:
                _check_state(stored, check)
            stored.verify(self.peers.rank, self.peers.world)
        except CheckpointError as error:
            problem = str(error)
        problem = self.peers.first_problem(problem)
        return (None, problem) if problem is not None else (cast(StoredCheckpoint, stored), "")


def _check_state(stored: StoredCheckpoint, check: StateCheck) -> None:
    """Let the state's owner look at it, and say the file in what it raises."""
    path = stored.folder / MANIFEST
    state = dict(stored.manifest.state)
    check(JsonObject(path, CheckpointError, ADVICE, state, "state."), stored.manifest.step)
