"""Texts that the model of a run has generated, kept in its folder for the page of its training."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.events import RunFolder
from weft.watch.run_record import objects_of

_MOST_BYTES = 256 * 1024
"""Read from the end of the file."""


def samples_file(run: RunFolder) -> Path:
    """Return the file of a run's samples, a line each."""
    return run.path / "samples.jsonl"


def keep_sample(path: Path, sample: Mapping[str, Any]) -> None:
    """Append one sample: `step` of the checkpoint, `prompt`, `text` with it in front, and the settings of the draw.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(sample, ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk took a part of the line before
            line = b"\n" + line
        # One write: two commands at once leave two whole lines.
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def newest_samples(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the newest samples, the newest first; none where there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            content = file.read()
    except OSError:
        return []
    lines = objects_of(content)
    kept = [each for each in lines if isinstance(each.get("text"), str) and isinstance(each.get("step"), int)]
    return kept[::-1][:most]
