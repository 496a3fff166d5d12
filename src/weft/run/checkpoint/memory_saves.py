"""The supervisor's side of saves in memory: their folder there, and the copies of them that last."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.events import Owned
from weft.run.checkpoint._checkpointer import KEEP
from weft.run.checkpoint.tiers import DiskFolder, Drain
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder

logger = logging.getLogger(__name__)


@contextmanager
def saves_in_memory(checkpoints: Path, owned: Owned | None) -> Generator[Path | None]:
    """Keep saves in memory, which outlive the ranks, and copy to the disk what shall last; None on a host that has no
    such memory.  At the end the newest one lies on the disk, whatever ended the run."""
    memory = create_memory_folder()
    if memory is None:
        yield None
        return
    disk = DiskFolder(checkpoints, KEEP, owned)
    drain = Drain(memory, disk)
    try:
        with drain:
            yield memory
    finally:
        is_good = drain.flush()
        disk.tidy()
        if is_good:
            remove_memory_folder(memory)
        else:
            logger.warning(
                "the newest save lies in %s alone. Make room, and copy it to %s.", memory, checkpoints.parent
            )
