"""Commits a checkpoint: a save gets its final name at one moment, complete, or it never gets it.

    step-000120.partial-<token>/            rank 0 makes it (`create_partial`)
        owner.json                          the process that writes: an orphaned folder can be told from a live one
        rank-00000-0000.safetensors, …      every rank writes and syncs its tensors (`weft.run.checkpoint._write`)
        rank-00000.json, …                  every rank's index of its files, synced after them
        manifest.json                       rank 0, when all ranks have finished: digests of the indexes (`commit`)
    step-000120/                            the same folder, renamed (`commit`)

A kill at any moment leaves either the old checkpoints alone, or the old ones and the new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from weft.process import machine_name, start_of
from weft.run.checkpoint._files import replace_text, sync_folder, write_text
from weft.run.checkpoint._folder import LATEST, OWNER, remove_leftovers, remove_old, step_name, tolerated
from weft.run.checkpoint._format import MANIFEST, Manifest

logger = logging.getLogger(__name__)


def partial_path(folder: Path, step: int, token: str) -> Path:
    """Return the folder that the save of a step writes into before it is committed."""
    return folder / f"{step_name(step)}.partial-{token}"


def create_partial(folder: Path, step: int, token: str) -> Path:
    """Make the folder that a save writes into, with a note of the process that owns it.  Raises `OSError`, and leaves
    nothing then."""
    partial = partial_path(folder, step, token)
    partial.mkdir(parents=True)
    # A pid alone is no owner: numbers are reused.  The start time of the process tells two with one number apart.
    owner = {"machine": machine_name(), "pid": os.getpid(), "started": start_of(os.getpid())}
    try:
        write_text(partial / OWNER, json.dumps(owner))
    except OSError:
        remove_partial(partial)
        raise
    return partial


def commit(folder: Path, partial: Path, manifest: Manifest, check_owned: Callable[[], object]) -> Path:
    """Turn the partial folder of a finished save into the checkpoint of its step.  Call on rank 0.

    At every moment at least one complete folder of the step exists if there was one before.

    Args:
        folder: the run's folder of checkpoints.
        partial: the folder that holds all ranks' synced files.
        manifest: of the new checkpoint; it is written here.
        check_owned: raises if another run has taken the folder over.

    Raises:
        OSError: the disk is full or not writable.
    """
    # The manifest comes last: it holds the digests of the indexes, which hold those of the tensor files.  A reader
    # takes a folder without a manifest for unfinished, so no order of the writes before it can be seen.
    write_text(partial / MANIFEST, manifest.to_text())
    # Asked as late as possible: other ranks may have written for minutes, in which another run can have begun.
    check_owned()
    final = folder / step_name(manifest.step)
    # The contents of the files are synced; their names are not until the folder is.  Without this a power loss after
    # the rename could leave a checkpoint under its final name that lacks files.
    sync_folder(partial)
    if final.exists():
        # A folder cannot be renamed over one that is not empty.  The old one keeps its manifest, and `_folder` takes
        # `.replaced-` folders for complete, so a kill between the two renames loses nothing.
        final.rename(folder / f"{final.name}.replaced-{manifest.token}")
    partial.rename(final)
    sync_folder(folder)  # makes the rename itself durable; the save may be reported as done after this
    with contextlib.suppress(OSError):  # not before: a save that dies just short of its name must still have an owner
        (final / OWNER).unlink()
    return final


def remove_partial(partial: Path) -> None:
    """Remove an unfinished save.  A failure is only warned about, since a full or lost disk may refuse even that."""
    with tolerated(f"unfinished checkpoint {partial.name} could not be removed"):
        shutil.rmtree(partial)


def tidy(folder: Path, step: int, token: str, keep: int) -> None:
    """Name the newest checkpoint and remove old ones.  This may fail without the save being any less good."""
    name = step_name(step)
    try:  # written inside the checkpoint, so that a kill leaves nothing beside it
        replace_text(folder / LATEST, name + "\n", folder / name / f"latest.{token}")
    except OSError as error:
        logger.warning("%s could not be written: %s", folder / LATEST, error)
    remove_leftovers(folder)
    remove_old(folder, keep, token)
