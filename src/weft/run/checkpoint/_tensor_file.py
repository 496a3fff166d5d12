"""A safetensors file read piece by piece, without being mapped.

What the library maps for torch is private and writable, and so counts whole as a process's own memory, under
`RLIMIT_DATA` and where a system does not overcommit; and pages of it that were read stay with the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.run.checkpoint._format import DTYPES

_CHUNK_BYTES = 8 << 20
"""Read at a time where what is read has another dtype or lies on a device."""


@final
class TensorFile:
    """Tensors of a file whose digest and header were found sound (`verify_file`, `verify_header`).

    Raises:
        OSError: it cannot be opened.
        CheckpointError: it changed since it was verified.
    """

    _descriptor = -1
    """Closed, or never opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        self._start = 8 + length
        try:
            self._header: Mapping[str, Mapping[str, Any]] = json.loads(os.pread(self._descriptor, length, 8))
        except ValueError:
            raise self._changed() from None

    def read(self, key: str, first: int, into: Tensor) -> None:
        """Fill a flat tensor from a stored one, which is taken as flat, too, from its element `first` on.

        Raises:
            CheckpointError: the file changed since it was verified, or cannot be read.
        """
        entry = self._header.get(key)
        if entry is None:
            raise self._changed()
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        begin += first * dtype.itemsize
        if begin + into.numel() * dtype.itemsize > end:
            raise self._changed()
        # The usual case reads straight into the parameter; the other one converts in chunks, so that no second copy is
        # made.
        if into.device.type == "cpu" and into.is_contiguous() and into.dtype == dtype:
            self._fill(into, begin)
            return
        length = _CHUNK_BYTES // dtype.itemsize
        for start in range(0, into.numel(), length):
            part = into[start : start + length]
            chunk = torch.empty(part.numel(), dtype=dtype)
            self._fill(chunk, begin + start * dtype.itemsize)
            part.copy_(chunk)

    def _fill(self, into: Tensor, begin: int) -> None:
        array: Any = into.detach().view(torch.uint8).numpy()
        memory, done = memoryview(array), 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], self._start + begin + done)
            except OSError as error:
                raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from None
            if not count:
                raise self._changed()
            done += count

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self._path} changed after it was verified. Load it again, or an earlier checkpoint.")

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()
