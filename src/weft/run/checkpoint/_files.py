"""Writing and checking of plain files: safetensors streamed with a digest, JSON, and what makes both durable."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import CheckpointError
from weft.files import digest_of_file
from weft.run.checkpoint._format import DTYPE_NAMES, StoredFile, StoredRange, digest_of

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""Hashed and written (or read) at a time: large enough for the disk, small enough to stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written under `key`, fetched when its turn comes."""

    key: str
    shape: Sequence[int]
    """Shape it is stored with; the tensor itself may be flat."""
    dtype: torch.dtype
    fetch: Callable[[], Tensor]
    written: Callable[[], None] | None = None
    """Called after the tensor was written, so that its owner can free memory."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def grouped(items: Iterable[T], size_bytes: Callable[[T], int], file_bytes: int) -> Iterator[list[T]]:
    """Yield the items in groups of at most `file_bytes`, or of one that is larger, in their order."""
    group, size = list[T](), 0
    for item in items:
        if group and size + size_bytes(item) > file_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += size_bytes(item)
    if group:
        yield group


def write_tensors(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> StoredFile:
    """Write a new safetensors file and return its size and digest.

    The format is an eight-byte header length, a JSON header and the raw tensors.  It is written here, and not by the
    library, so that tensors leave the device one chunk at a time, the digest is taken on the way, and no rank needs its
    shard in memory twice.  Source: the format's description in the safetensors repository.

    Raises:
        OSError: the disk is full or not writable.
    """
    header, offset = dict[str, object](), 0
    if metadata:
        header["__metadata__"] = dict(metadata)
    for entry in entries:
        end = offset + entry.size_bytes
        dtype = DTYPE_NAMES[entry.dtype]
        header[entry.key] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned; the format allows spaces after the header
    digest = xxhash.xxh3_128()
    # "x": a file that exists belongs to another save.  Unbuffered: chunks go to the kernel as they are.
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), len(text).to_bytes(8, "little") + text, digest)
        for entry in entries:
            for chunk in _byte_chunks(entry.fetch()):
                _write_all(file.fileno(), chunk, digest)
            if entry.written is not None:
                entry.written()
        # The commit renames a folder whose contents must be on the disk; each rank syncs its own files, in parallel.
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return StoredFile(name=path.name, size_bytes=size, digest=digest.hexdigest())


def write_text(path: Path, text: str) -> StoredFile:
    """Write a new text file durably and return its size and digest.  Raises `OSError`."""
    content = text.encode()
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), content, None)
        os.fsync(file.fileno())
    return StoredFile(name=path.name, size_bytes=len(content), digest=digest_of(content))


def replace_text(path: Path, text: str, aside: Path) -> None:
    """Write a small text file so that a reader sees the old text or the new one, never a part.  Raises `OSError`.

    It is written to `aside`, on the same disk, and takes its name when it is whole.
    """
    try:
        write_text(aside, text)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.  Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify_file(folder: Path, stored: StoredFile) -> None:
    """Read the whole file and compare it with its digest.

    Raises:
        CheckpointError: it is missing, unreadable, of another size, or differs in any bit.
    """
    path = folder / stored.name
    check_size(folder, stored)
    try:
        digest = digest_of_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if digest != stored.digest:
        raise CheckpointError(f"{path} does not match its digest: its content changed after it was written.")


def check_size(folder: Path, stored: StoredFile) -> None:
    """Check that a plain file of the right size is there.

    Raises:
        CheckpointError: it is missing, a link, or of another size.
    """
    path = folder / stored.name
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link; a checkpoint has only plain files.")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, or no plain file.")
        if (size := path.stat().st_size) != stored.size_bytes:
            raise CheckpointError(f"{path} has {size:,} bytes, but {stored.size_bytes:,} were written.")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading: no link is followed, no pipe waited for.  Raises `OSError`."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def verify_header(folder: Path, name: str, expected: Sequence[StoredRange]) -> None:
    """Check that a safetensors file holds the expected runs and nothing else.

    Raises:
        CheckpointError: its header is no such header, or says otherwise.
    """
    path = folder / name
    try:
        library: Callable[..., Any] = safe_open  # it has no types
        with library(path, framework="np") as file:  # for torch it would map the file as memory of its own
            keys = set[str](file.keys())
            for run in expected:
                part = file.get_slice(run.key) if run.key in keys else None
                forms = ([run.length], list(run.local_shape) if run.length == run.local_shape.numel() else None)
                if part is None or part.get_dtype() != DTYPE_NAMES[run.dtype] or part.get_shape() not in forms:
                    raise CheckpointError(
                        f"{path} does not hold {run.key} as its index says: it was not written by Weft."
                    )
            if extra := sorted(keys - {run.key for run in expected}):
                raise CheckpointError(f"{path} holds {extra[0]:.80}, of which its index says nothing: it was changed.")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not readable as safetensors ({error}): it is damaged.") from None


def _byte_chunks(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    length = CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), length):
        array: Any = flat[start : start + length].cpu().contiguous().view(torch.uint8).numpy()
        yield memoryview(array)


def _write_all(descriptor: int, content: bytes | memoryview, digest: xxhash.xxh3_128 | None) -> None:
    """Write everything: one `write` may take less, and the next then raises what stopped it."""
    if digest is not None:
        digest.update(content)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
