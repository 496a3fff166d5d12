"""Files that are whole or absent, and the folder of what Weft keeps from one run to the next."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash


def cache_folder(*names: str) -> Path:
    """Return `$XDG_CACHE_HOME/weft/…`, or `~/.cache/weft/…` where that is not set.  Nothing is made."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache").joinpath("weft", *names)


@contextmanager
def written_aside(path: Path) -> Generator[Path]:
    """Give the path of a file beside `path`, which takes its place once it is written: a reader sees what was there
    before or all of the new one, never a part.  Where the writing raises, nothing is left.  Raises `OSError`."""
    aside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file so that a reader sees what was there before or all of this, never a part; `durable`: also after the
    machine has lost its power.  Raises `OSError`, and leaves nothing then."""
    with written_aside(path) as aside, aside.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())


def digest_of_file(path: str | Path) -> str:
    """Return the xxh3-128 of a file's content, hexadecimal.  Raises `OSError`."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
