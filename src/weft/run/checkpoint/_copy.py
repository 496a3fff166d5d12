"""Copies a complete checkpoint from one folder of checkpoints to another, such as from memory to a disk."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from weft.errors import CheckpointError
from weft.events import Owned
from weft.run.checkpoint import _folder
from weft.run.checkpoint._commit import commit, create_partial, remove_partial, tidy
from weft.run.checkpoint._files import CHUNK_BYTES, open_plain
from weft.run.checkpoint._format import Manifest, StoredFile
from weft.run.checkpoint._read import StoredCheckpoint


def copy_checkpoint(source: Path, folder: Path, *, keep: int, owned: Owned | None = None) -> Path:
    """Copy a checkpoint into another folder, durably, and remove the oldest there.  Return where it lies now.

    Every byte is compared with its digest on the way, so what was changed in memory does not reach the disk.  The files
    of the source are opened before the first is copied: it may be removed meanwhile.

    Args:
        source: a complete checkpoint (`step-000120`).
        folder: the folder of checkpoints that gets it; made if it is not there.
        keep: newest checkpoints to keep there.
        owned: asked before the copy gets its name, whether the folder is still this run's.

    Raises:
        CheckpointError: the source is damaged.
        LaunchError: another run owns the folder by now.
        OSError: the disk is full or not writable.
    """
    manifest = _folder.named_manifest(source)
    # What a load would refuse must not take the place of an older checkpoint on the disk.
    stored_checkpoint = StoredCheckpoint(source)
    stored_checkpoint.verify_headers()
    with ExitStack() as stack:
        stored_files = [*stored_checkpoint.files, *manifest.indexes]
        files = [(stored, stack.enter_context(open_plain(source / stored.name))) for stored in stored_files]
        folder.mkdir(parents=True, exist_ok=True)
        _folder.remove_leftovers(folder)
        partial = create_partial(folder, manifest.step, manifest.token)
        try:
            for stored, file in files:
                _copy_file(stored, file, partial / stored.name)
            return commit_copy(folder, partial, manifest, keep=keep, owned=owned)
        except BaseException:
            remove_partial(partial)
            raise


def commit_copy(folder: Path, partial: Path, manifest: Manifest, *, keep: int, owned: Owned | None) -> Path:
    """Give a copy its name, and remove the oldest.  Its number among the saves counts those of its new folder."""
    complete = _folder.complete_checkpoints(folder)
    sequence = max((one.manifest.sequence for one in complete), default=0) + 1
    copied = replace(manifest, sequence=sequence)
    final = commit(folder, partial, copied, lambda: owned is None or owned.check())
    tidy(folder, manifest.step, manifest.token, keep)
    return final


def _copy_file(stored: StoredFile, file: BinaryIO, target: Path) -> None:
    digest, size = xxhash.xxh3_128(), 0
    with target.open("xb", buffering=0) as copy:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(copy.fileno(), rest) :]
        os.fsync(copy.fileno())
    if size != stored.size_bytes or digest.hexdigest() != stored.digest:
        raise CheckpointError(f"{file.name} does not match its digest: its content changed after it was written.")
