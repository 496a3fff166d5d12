"""The user's cache for tests, but for what runs teach predictions: that is of each test alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from weft.files import cache_folder

_SHARED = ("auto", "collectives", "descriptions", "machines", "proofs")
"""Folders of the cache that tests go on sharing with all runs of this user."""


def isolate() -> Path:
    """Let this process and its children have a cache of their own that leads into the user's, and return the folder of
    recorded runs in it.  It is removed when this process ends."""
    users, made = cache_folder(), Path(tempfile.mkdtemp(prefix="weft-tests-cache-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    own = made / "weft"
    own.mkdir()
    for name in _SHARED:
        (users / name).mkdir(parents=True, exist_ok=True)
    for path in users.iterdir():
        if path.name != "learned":
            (own / path.name).symlink_to(path)
    os.environ["XDG_CACHE_HOME"] = str(made)
    return own / "learned"
