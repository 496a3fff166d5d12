"""Offloading on a rank: what waits on the disk, or in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportPrivateImportUsage]

from weft.errors import PlanError
from weft.formatting import format_bytes
from weft.techniques.core import ModelPart, Shard
from weft.techniques.offload.keeper import StateKeeper
from weft.techniques.offload.place import new_file, where
from weft.techniques.offload.storage import HostStorage, Storage
from weft.techniques.runtime import Build, TechniqueRuntime

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


@final
class OffloadedStates(TechniqueRuntime):
    """What the optimizer works on, elsewhere between two steps."""

    def __init__(self, build: Build) -> None:
        self._build = build
        # Beside weights that lie with the host, its cores step.
        self._device = torch.device("cpu") if build.plan.memory.offloads_parameters else build.mesh.device
        self._keeper = StateKeeper(self._device)
        self._shards: Sequence[Shard] = ()
        self._kept_bytes = 0

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        # A step names few rows of a sparse table: moving all of it to and fro would take longer than the step.  And
        # what ZeRO-3 has not cut stays with its states on the device where everything else lies with the host.
        here = [shard for shard in shards if shard.master.device.type == self._device.type]
        self._shards = [shard for shard in here if not shard.sparse]
        for shard in self._shards:
            shard.keeper = self._keeper

    def begin(self, shards: Sequence[Shard]) -> None:
        self._kept_bytes = self._keeper.begin(self._shards, self._storage)
        goes_alone = not self._build.plan.memory.offloads_parameters
        if goes_alone and self._kept_bytes == 0 and any(shard.size for shard in self._shards):
            raise PlanError(
                'plan.memory.offload = "optimizer" would move nothing: this optimizer keeps no state as long as its'
                f' weights, and with precision = "{self._build.plan.compute.precision}" weights are their own masters.'
                ' Use offload = "none", or precision = "bf16", which has masters.'
            )

    def _storage(self, num_bytes: int) -> Storage:
        if not self._build.plan.memory.offloads_to_disk:
            return HostStorage(num_bytes, self._build.mesh.device)
        return new_file(self._build, num_bytes)

    def state_bytes(self) -> int:
        return self._keeper.buffer_bytes()

    def notes(self) -> list[str]:
        kept, buffers = format_bytes(self._kept_bytes), format_bytes(self._keeper.buffer_bytes())
        return [
            f"{kept} of masters and optimizer states are {where(self._build)}, and pass through {buffers} of buffers in"
            " every step"
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._keeper.refresh(self._shards)

    def close(self) -> None:
        self._keeper.close()


@final
class _Several(TechniqueRuntime):
    """Several of them, as one."""

    span: ClassVar[str] = "offload"

    def __init__(self, runtimes: Sequence[TechniqueRuntime]) -> None:
        self._each = runtimes

    def wrap(self, part: ModelPart) -> None:
        for one in self._each:
            one.wrap(part)

    def on_sharded(self, part: ModelPart) -> Callable[[], None] | None:
        called = [rest for one in self._each if (rest := one.on_sharded(part)) is not None]
        return called[0] if called else None

    def offload_policy(self) -> OffloadPolicy | None:
        return next((policy for one in self._each if (policy := one.offload_policy()) is not None), None)

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        for one in self._each:
            one.attach_shards(shards)

    def begin(self, shards: Sequence[Shard]) -> None:
        for one in self._each:
            one.begin(shards)

    def end_step(self, step: int, counts: Sequence[float] | None) -> bool:
        changed = [one.end_step(step, counts) for one in self._each]
        return any(changed)

    def offloaded_storages(self) -> Collection[int]:
        return {identity for one in self._each for identity in one.offloaded_storages()}

    def state_bytes(self) -> int:
        return sum(one.state_bytes() for one in self._each)

    def notes(self) -> list[str]:
        return [note for one in self._each for note in one.notes()]

    def load_state(self, state: Mapping[str, Any]) -> None:
        for one in self._each:
            one.load_state(state)

    def close(self) -> None:
        for one in self._each:
            one.close()


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`.

    Raises:
        PlanError: something would go to the memory of the host from cores, whose memory that is.
    """
    memory = build.plan.memory
    is_dry = isinstance(torch.empty(0), FakeTensor)  # then another device than this one is meant
    if build.mesh.device.type == "cpu" and not memory.offloads_to_disk and not is_dry:
        raise PlanError(
            'plan.memory.offload_to = "host" moves what a device holds to the memory of its host, and this rank'
            ' computes on the host\'s cores: nothing would get smaller. Use offload_to = "disk", or offload = "none".'
        )
    runtimes: list[TechniqueRuntime] = []
    if memory.offloads_parameters and memory.offloads_to_host:
        from weft.techniques.offload.hosted import HostedParameters  # loaded where they are offloaded

        runtimes.append(HostedParameters(build))
    elif memory.offloads_parameters:
        from weft.techniques.offload.mapped import OffloadedParameters  # as above

        runtimes += [OffloadedParameters(build), OffloadedStates(build)]
    elif memory.offloads_optimizer:
        runtimes.append(OffloadedStates(build))
    if memory.offloads_activations:
        from weft.techniques.offload.blocks import OffloadedActivations  # loaded where they are offloaded

        runtimes.append(OffloadedActivations(build))
    return runtimes[0] if len(runtimes) == 1 else _Several(runtimes)
