"""Where offloaded states lie: a file, which is read and written past the page cache where that can be, or the memory of
the host, pinned, for devices that have one of their own."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from weft.errors import PlanError
from weft.formatting import format_bytes

ALIGNMENT = mmap.PAGESIZE
"""What starts, lengths and addresses of direct transfers are multiples of."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Storage(Protocol):
    """So many bytes, zero at first.  `read` and `write` may run on another thread; starts and lengths are aligned."""

    def read(self, start: int, into: Tensor) -> None:
        """Fill a flat tensor of bytes from `start` on, and return when it is there."""
        ...

    def write(self, start: int, source: Tensor) -> None:
        """Keep a flat tensor of bytes from `start` on, and return when it may be changed."""
        ...

    def view(self, start: int, length: int) -> Tensor:
        """Return bytes as they lie there, a flat tensor on the CPU: what is written to it counts."""
        ...

    def let_go(self) -> None:
        """Let memory go in which views were read."""
        ...

    def close(self) -> None:
        """Let go of it; what it held is gone."""
        ...


def new_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return a flat tensor of bytes on a device, on CPUs so aligned that files can be read into it directly."""
    if device.type != "cpu" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    # Private: shared memory would be outside of what a limit on a process's own memory counts.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


@final
class HostStorage:
    """Pinned memory of the host, beside a device with memory of its own."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        # Beside the device's work and not behind it: nobody works on a buffer while it is moved.
        self._stream = torch.Stream(device)

    def read(self, start: int, into: Tensor) -> None:
        self._move(into, self._bytes[start : start + into.numel()])

    def write(self, start: int, source: Tensor) -> None:
        self._move(self._bytes[start : start + source.numel()], source)

    def _move(self, into: Tensor, source: Tensor) -> None:
        with self._stream:
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def view(self, start: int, length: int) -> Tensor:
        return self._bytes[start : start + length]

    def let_go(self) -> None:
        """Nothing to do: it lies in memory."""

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)  # a part of it would keep all of it


@final
class FileStorage:
    """A file that has no name any more, so that it ends with the process, however that ends.

    Its place on the disk is taken at once.  Transfers are direct where the file system can (`is_direct`): states that
    are read once per step would only drive everything else out of the page cache.

    Raises:
        PlanError: the folder has no room for it, or cannot be written to.
    """

    def __init__(self, num_bytes: int, folder: Path, device: torch.device) -> None:
        self._staging = None if device.type == "cpu" else new_buffer(0, torch.device("cpu"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _new_file(folder)
        except OSError as error:
            raise PlanError(
                f'plan.memory.offload_to = "disk" cannot write to {folder}: {error.strerror}. Name a folder that this'
                ' process may write to by memory.offload_folder, or use offload = "none".'
            ) from error
        self._folder, self._num_bytes = folder, 0
        try:
            self.grow(num_bytes)
            self._direct = None if _is_in_memory(self._file) else _open_directly(self._file)
        except BaseException:
            os.close(self._file)
            raise
        self._map: mmap.mmap | None = None

    def grow(self, num_bytes: int) -> None:
        """Take the place of so many bytes in all; what is there stays.  Raises `PlanError`: there is no room."""
        if num_bytes <= self._num_bytes:
            return
        try:
            os.posix_fallocate(self._file, self._num_bytes, num_bytes - self._num_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise PlanError(_no_room(num_bytes, num_bytes - self._num_bytes, self._folder, error)) from error
        self._num_bytes = num_bytes

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._direct is not None

    def read(self, start: int, into: Tensor) -> None:
        buffer = into if into.device.type == "cpu" else self._staged(into.numel())
        memory, done = buffer.numpy().data, 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], start + done)
            assert count > 0, "the file is as long as it was made"
            done += count
        if buffer is not into:
            into.copy_(buffer)

    def write(self, start: int, source: Tensor) -> None:
        buffer = source if source.device.type == "cpu" else self._staged(source.numel()).copy_(source)
        memory, done = buffer.numpy().data, 0
        while done < len(memory):
            try:
                done += os.pwritev(self._descriptor, [memory[done:]], start + done)
            except OSError as error:  # a file system that promises room which it does not keep
                if error.errno not in _FULL:
                    raise
                raise PlanError(_no_room(self._num_bytes, len(memory) - done, self._folder, error)) from error

    def view(self, start: int, length: int) -> Tensor:
        if self._map is None:
            self._map = mmap.mmap(self._file, self._num_bytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=start)

    def let_go(self) -> None:
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        for descriptor in (self._file, self._direct):
            if descriptor is not None:
                os.close(descriptor)
        self._map = None  # a view that somebody still has keeps its pages

    @property
    def descriptor(self) -> int:
        """The file, as the page cache has it."""
        return self._file

    @property
    def _descriptor(self) -> int:
        return self._file if self._direct is None else self._direct

    def _staged(self, length: int) -> Tensor:
        """Memory of the host on the way between the file and a device; one thread at a time moves anything."""
        assert self._staging is not None
        if self._staging.numel() < length:
            self._staging = new_buffer(length, torch.device("cpu"))
        return self._staging[:length]


def _new_file(folder: Path) -> int:
    """Open a new file without a name: one that never had any, where the file system has such files, so that a kill at
    any moment leaves nothing."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="offloaded-", dir=folder)
    os.unlink(name)
    return descriptor


def _open_directly(descriptor: int) -> int | None:
    """Open a file once more, past the page cache; None where its file system has no such way."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        return None


def _is_in_memory(descriptor: int) -> bool:
    """Whether a file system keeps its files in memory, though it may say that it transfers directly."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {line.split(" - ", 1)[1].split()[0] for line in mounts if line.split()[2] == number}
    return bool(kinds & {"tmpfs", "ramfs"})


def _no_room(num_bytes: int, more_bytes: int, folder: Path, error: OSError) -> str:
    file_system = os.statvfs(folder)
    free = file_system.f_bavail * file_system.f_frsize
    lacking = f", {format_bytes(more_bytes - free)} too few" if more_bytes > free else ""
    if error.errno != errno.ENOSPC:  # a quota, or the longest file that a process may write
        lacking += f' ("{error.strerror}")'
    return (
        f'plan.memory.offload_to = "disk" needs {format_bytes(num_bytes)} in {folder} for this rank alone, and'
        f" {format_bytes(free)} are free{lacking}. Name another place by memory.offload_folder, or use"
        ' offload = "none".'
    )
