"""The one place in Weft that calls `torch.load`: with `weights_only=True`, in a process that was confined before."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError


def load_torch(source: Path | io.BytesIO, where: str) -> Any:
    """Return what `torch.save` wrote, if it is made of tensors and plain values.  There is no other way of reading it:
    what torch's restricted reader refuses is refused.

    Raises:
        CheckpointError: it is damaged, or holds anything else.
    """
    is_file = isinstance(source, Path)
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_file and _is_archive(source))
    except MemoryError:
        raise
    except Exception as problem:  # torch raises errors of many classes for what is damaged
        # Torch's own text tells how to load the file all the same, by running what is in it.
        named = re.search(r"GLOBAL ([\w.]+)", str(problem))
        what = f"it needs {named[1]}" if named else type(problem).__name__
        raise CheckpointError(
            f"{where} cannot be read as tensors and plain values alone ({what}). It is damaged, or holds objects that"
            " only running code could make. Save the state_dict() by itself, where the file was made."
        ) from None


def _is_archive(path: Path) -> bool:
    """Whether a file is of the form in which tensors can be mapped; older ones are read whole."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
