"""A supervisor's folders in the host's memory: what is in them outlives the ranks that wrote it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from weft.files import write_whole
from weft.process import machine_name, start_of

_SHARED_MEMORY = Path("/dev/shm")
SAVES, RINGS = "saves", "rings"
"""Kinds of folders: for saves, and for what ranks record."""
_OWNER = "owner.json"


def create_memory_folder(kind: str = SAVES) -> Path | None:
    """Make a folder in memory that only this user can enter, for a supervisor that removes it; None where the system
    has none.  What supervisors left that were killed is removed first."""
    if not _SHARED_MEMORY.is_dir():
        return None
    prefix = f"weft-{kind}-{os.getuid()}-"
    _remove_orphans(prefix)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{secrets.token_hex(4)}-", dir=_SHARED_MEMORY))
        _write_owner(folder)
    except OSError:
        return None
    return folder


def named_memory_folder(kind: str, name: str, *, owns: bool) -> Path | None:
    """Return the folder in memory that several processes of this user know by name, made by whoever comes first; None
    where the system has none.  The process that `owns` it removes it."""
    if not _SHARED_MEMORY.is_dir():
        return None
    prefix = f"weft-{kind}-{os.getuid()}-"
    folder = _SHARED_MEMORY / f"{prefix}{name}"
    try:
        if owns:
            _remove_orphans(prefix)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            return None  # somebody else has made it
        if owns:
            _write_owner(folder)
    except OSError:
        return None
    return folder


def remove_memory_folder(folder: Path) -> None:
    """Remove the folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def _write_owner(folder: Path) -> None:
    owner = {"machine": machine_name(), "pid": os.getpid(), "started": start_of(os.getpid())}
    write_whole(folder / _OWNER, json.dumps(owner))


def _remove_orphans(prefix: str) -> None:
    for folder in _SHARED_MEMORY.glob(f"{prefix}*"):
        try:
            owner = json.loads((folder / _OWNER).read_text())
        except (OSError, ValueError):
            continue  # just being made
        if owner["machine"] == machine_name() and start_of(int(owner["pid"])) != owner["started"]:
            remove_memory_folder(folder)
