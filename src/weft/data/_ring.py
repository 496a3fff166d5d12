"""Batches in memory that processes share: a ring of slots with one fixed layout, and nothing but numbers in it.

The memory has no name, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data._fields import Field, Fields

_ALIGNMENT = 64


def create_memory(num_bytes: int) -> int:
    """Return a file descriptor of anonymous memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("weft-batches")
    else:  # no Linux: an unlinked file does the same
        with tempfile.TemporaryFile() as stream:
            descriptor = os.dup(stream.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class Ring:
    """Slots that each hold `num_samples` samples of the given fields.

    Args:
        descriptor: Shared memory of at least `num_slots × slot_bytes` bytes; None: create it.
    """

    def __init__(
        self, fields: Mapping[str, Field], num_samples: int, num_slots: int, descriptor: int | None = None
    ) -> None:
        self._places: dict[str, tuple[int, tuple[int, ...], str]] = {}
        at = 0
        for name in sorted(fields):
            shape = (num_samples, *fields[name].shape)
            self._places[name] = (at, shape, fields[name].dtype)
            num_bytes = int(np.prod(shape)) * np.dtype(fields[name].dtype).itemsize
            at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.slot_bytes = max(at, _ALIGNMENT)
        size = self.slot_bytes * num_slots
        self.descriptor = create_memory(size) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, size)

    def write(self, slot: int, batch: Fields) -> None:
        for name in self._places:
            self._view(slot, name)[...] = batch[name]

    def read(self, slot: int) -> Fields:
        """Return copies, so that the slot may be written again at once."""
        return {name: self._view(slot, name).copy() for name in self._places}

    def _view(self, slot: int, name: str) -> NDArray[Any]:
        at, shape, dtype = self._places[name]
        return np.ndarray(shape, dtype, self._memory, slot * self.slot_bytes + at)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
