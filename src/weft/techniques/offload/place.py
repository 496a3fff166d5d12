"""Where a rank's files lie while it trains, and what it keeps of memory that it has freed."""

from __future__ import annotations

import ctypes
import logging
import tempfile
from contextlib import suppress
from pathlib import Path

from weft.techniques.offload.storage import FileStorage
from weft.techniques.runtime import Build

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BYTES = -1, -3, 128 << 10


def new_file(build: Build, num_bytes: int) -> FileStorage:
    """Return a file of so many bytes where the plan says; else with the run's files, or where the system keeps passing
    ones.

    Raises:
        PlanError: there is no room, or nobody may write there.
    """
    named = build.plan.memory.offload_folder
    usual = Path(tempfile.gettempdir()) if build.folder is None else build.folder
    folder = Path(named).expanduser() if named else usual
    storage = FileStorage(num_bytes, folder, build.mesh.device)
    if not storage.is_direct and build.mesh.rank == 0:
        logger.warning(
            'plan.memory.offload_to = "disk": files in %s cannot be read past the page cache, where what is offloaded'
            " takes memory that other files may need, and on a file system in memory nothing is saved at all. Name a"
            " folder on a disk by memory.offload_folder.",
            folder,
        )
    return storage


def where(build: Build) -> str:
    """Words for where what is offloaded waits."""
    return "on the disk" if build.plan.memory.offloads_to_disk else "in the memory of the host"


def return_what_is_freed() -> None:
    """Let glibc give large blocks, and the free end of a heap, back to the kernel: its thresholds rise to 32 and 64 MiB
    with what is freed, and a rank would keep what it had gathered."""
    with suppress(OSError, AttributeError):  # another C library gives them back, or knows no way to be told
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, _LARGE_BYTES)
