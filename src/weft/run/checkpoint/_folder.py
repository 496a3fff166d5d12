"""The folder of a run's checkpoints: which are complete, which may go, and whose unfinished saves lie about.

step-000120/                      complete: it has a manifest
step-000120.partial-<token>/      a save under way, or one that died
step-000120.replaced-<token>/     complete, and about to be removed: the same step was saved again
step-000100.removing-<token>/     on its way out
latest                            name of the newest; for people and scripts, Weft looks at the manifests
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.config.document import JsonObject, read_plain_file
from weft.errors import CheckpointError
from weft.process import machine_name, start_of
from weft.run.checkpoint._format import MANIFEST, Manifest, read_manifest

logger = logging.getLogger(__name__)

LATEST = "latest"
PINNED = "pinned"
"""Empty file in a checkpoint that no save removes."""
OWNER = "owner.json"
"""File in a partial folder that says which process writes it."""
_COMPLETE = re.compile(r"step-\d{6,}(\.replaced-[0-9a-f]+)?", re.ASCII)
_LEFTOVER = re.compile(r"step-\d{6,}\.(partial|removing|replaced)-[0-9a-f]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    path: Path
    manifest: Manifest


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def complete_checkpoints(folder: Path) -> list[CompleteCheckpoint]:
    """Return the folders with a sound manifest, newest first.  Damaged manifests are warned about and left out."""
    complete = list[CompleteCheckpoint]()
    for path in _folders(folder, _COMPLETE, links=True):
        # A save gets this name with its manifest, so a folder without one has lost it: that is said, too.
        try:
            complete.append(CompleteCheckpoint(path, named_manifest(path)))
        except CheckpointError as error:
            logger.warning("checkpoint %s is passed over: %s", path.name, error)
    return sorted(complete, key=lambda one: (one.manifest.sequence, one.manifest.step), reverse=True)


def named_manifest(path: Path) -> Manifest:
    """Return the manifest of a folder that a save has named.

    Raises:
        CheckpointError: it is missing or damaged, or is that of another step; or the folder is a link.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, where only a folder belongs.")
    manifest = read_manifest(path)
    if path.name.split(".")[0] != step_name(manifest.step):
        raise CheckpointError(
            f"{path / MANIFEST}: step is {manifest.step}, but should be that of its folder, {path.name}."
            " It is damaged, or was not written by Weft: load an earlier checkpoint."
        )
    return manifest


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest complete one in it or in its `checkpoints` folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if complete := complete_checkpoints(folder):
            return complete[0].path
    what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
    what = "is a file" if path.is_file() else what
    raise CheckpointError(f"{path} {what}. Give the folder of a run, or of one checkpoint (step-000120) in it.")


def remove_old(folder: Path, keep: int, token: str) -> None:
    """Remove complete checkpoints but the newest `keep` and those that are pinned; best effort."""
    # Renamed first, at one moment: an interrupted removal leaves no folder that looks complete and lacks files.
    for one in complete_checkpoints(folder)[keep:]:
        if (one.path / PINNED).exists():
            continue
        gone = folder / f"{step_name(one.manifest.step)}.removing-{token}{one.manifest.sequence:x}"
        with tolerated(f"old checkpoint {one.path.name} could not be removed"):
            one.path.rename(gone)
            shutil.rmtree(gone)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead saves of this machine left, and what was on its way out.

    A partial folder whose process may still live (here, in another container, on another machine) is not touched.
    """
    for path in _folders(folder, _LEFTOVER):
        kind = path.name.split(".")[1].split("-")[0]
        # `.replaced-` may be the only complete folder of its step: between the two renames of a commit it is, and a
        # kill there leaves it so.  It goes once the new folder of that step has its manifest.
        successor = folder / path.name.split(".")[0] / MANIFEST
        superseded = kind == "removing" or (kind == "replaced" and successor.exists())
        if superseded or (kind == "partial" and _is_orphan(path)):
            with tolerated(f"{path.name} could not be removed"):
                shutil.rmtree(path)


def _folders(folder: Path, pattern: re.Pattern[str], *, links: bool = False) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        # Not through links: what is removed or loaded must lie in this folder.
        if pattern.fullmatch(path.name) and path.is_dir() and (links or not path.is_symlink()):
            yield path


def _is_orphan(partial: Path) -> bool:
    """Whether the process that made a partial folder ran on this machine and is gone."""
    path = partial / OWNER
    if not any(partial.iterdir()) or (path.is_file() and not path.stat().st_size):
        return True  # died within the microseconds between making the folder and saying whose it is
    try:
        owner = JsonObject.parse(
            path, read_plain_file(path, CheckpointError, "", most_bytes=1 << 16), CheckpointError, ""
        )
        pid, machine = owner.count("pid", least=1, most=(1 << 31) - 1), owner.text("machine")
    except CheckpointError:
        return False
    # The process of another machine, or of another container, cannot be asked for; its folder stays.
    return machine == machine_name() and start_of(pid) != owner.values.get("started")


@contextlib.contextmanager
def tolerated(what: str) -> Generator[None]:
    """Turn an `OSError` into a warning that begins with `what`."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk that holds a folder, or will."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
