"""Offloading on a rank: masters and optimizer states wait on the disk, or in the memory of the host."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from weft.errors import PlanError
from weft.figures import spell_bytes
from weft.parallel import Shard
from weft.parallel.technique import Build, TechniqueRuntime
from weft.techniques.offload.keeper import StateKeeper
from weft.techniques.offload.storage import FileStorage, HostStorage, Storage

logger = logging.getLogger(__name__)


@final
class OffloadedStates(TechniqueRuntime):
    """What the optimizer works on, elsewhere between two steps."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._keeper = StateKeeper(build.mesh.device)
        self._shards: Sequence[Shard] = ()
        self._kept_bytes = 0

    def take(self, shards: Sequence[Shard]) -> None:
        # A step names few rows of a sparse table: moving all of it to and fro would take longer than the step.
        self._shards = [shard for shard in shards if not shard.sparse]
        for shard in self._shards:
            shard.keeper = self._keeper

    def begin(self, shards: Sequence[Shard]) -> None:
        self._kept_bytes = self._keeper.begin(self._shards, self._storage)
        if self._kept_bytes == 0 and any(shard.size for shard in self._shards):
            raise PlanError(
                'plan.memory.offload = "optimizer" would move nothing: this optimizer keeps no state as long as its'
                f' weights, and with precision = "{self._build.plan.compute.precision}" weights are their own masters.'
                ' Use offload = "none", or precision = "bf16", which has masters.'
            )

    def _storage(self, num_bytes: int) -> Storage:
        if not self._build.plan.memory.offloads_to_disk:
            return HostStorage(num_bytes, self._build.mesh.device)
        storage = FileStorage(num_bytes, self._folder(), self._build.mesh.device)
        if not storage.is_direct and self._build.mesh.rank == 0:
            logger.warning(
                'plan.memory.offload_to = "disk": files in %s cannot be read past the page cache, where the states take'
                " memory that other files may need, and on a file system in memory nothing is saved at all. Name a"
                " folder on a disk by memory.offload_folder.",
                self._folder(),
            )
        return storage

    def _folder(self) -> Path:
        """Where the plan says; else with the run's files, or where the system keeps passing ones."""
        named = self._build.plan.memory.offload_folder
        if named:
            return Path(named).expanduser()
        return Path(tempfile.gettempdir()) if self._build.folder is None else self._build.folder

    def state_bytes(self) -> int:
        return self._keeper.buffer_bytes()

    def notes(self) -> list[str]:
        where = "on the disk" if self._build.plan.memory.offloads_to_disk else "in the memory of the host"
        return [
            f"{spell_bytes(self._kept_bytes)} of masters and optimizer states are {where}, and pass through"
            f" {spell_bytes(self._keeper.buffer_bytes())} of buffers in every step"
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._keeper.refresh(self._shards)

    def close(self) -> None:
        self._keeper.close()


def create(build: Build) -> TechniqueRuntime:
    """See `weft.parallel.technique`.

    Raises:
        PlanError: states would go to the memory of the host from cores, whose memory that is.
    """
    if build.mesh.device.type == "cpu" and not build.plan.memory.offloads_to_disk:
        raise PlanError(
            'plan.memory.offload_to = "host" moves what a device holds to the memory of its host, and this rank'
            ' computes on the host\'s cores: nothing would get smaller. Use offload_to = "disk", or offload = "none".'
        )
    return OffloadedStates(build)
