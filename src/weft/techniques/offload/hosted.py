"""A rank's shards of ZeRO-3 in the memory of an accelerator's host, with their gradients and optimizer states.

`fully_shard` copies a unit's weights to the device as it gathers them, and gradients back as it has reduced them.  What
lies with the host is stepped there, so states never travel.  Weights change only after the ranks have agreed on a step,
which has waited for the device: copies that are under way have read the old ones.
Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from weft.formatting import format_bytes
from weft.techniques.core import ModelPart, Shard
from weft.techniques.offload.mapped import identity_of, is_fake
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class HostedParameters(TechniqueRuntime):
    """Shards, gradients and states with the host.  In a dry run, which has one kind of memory, it says which are."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._parts: list[ModelPart] = []
        self._kept_bytes = 0
        self._states = _StatesOfADryRun() if is_fake() else None

    def wrap(self, part: ModelPart) -> None:
        self._parts.append(part)

    def offload_policy(self) -> OffloadPolicy | None:
        return None if is_fake() else CPUOffloadPolicy(pin_memory=True)

    def on_sharded(self, part: ModelPart) -> Callable[[], None] | None:
        sharded = {id(parameter): parameter for parameter in part.module.parameters() if isinstance(parameter, DTensor)}
        sizes = [
            parameter.to_local().numel() * parameter.element_size() * (1 + parameter.requires_grad)
            for parameter in sharded.values()
        ]
        self._kept_bytes += sum(sizes)
        return None

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        if self._states is None:
            return
        hosted = [weight for part in self._parts for weight in part.module.parameters() if isinstance(weight, DTensor)]
        for parameter in hosted:
            self._states.offloaded.add(identity_of(parameter))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._land)
        for shard in shards:
            if shard.master.untyped_storage()._cdata in self._states.offloaded:  # pyright: ignore[reportPrivateUsage]
                shard.keeper = self._states

    def _land(self, parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        assert self._states is not None
        self._states.offloaded.add(identity_of(parameter.grad))

    def offloaded_storages(self) -> Collection[int]:
        return () if self._states is None else self._states.offloaded

    def close(self) -> None:
        self._parts.clear()

    def notes(self) -> list[str]:
        return [
            f"{format_bytes(self._kept_bytes)} of weights and gradients are in the host's memory, and stepped there"
        ]


@final
class _StatesOfADryRun:
    """Marks states as away; a `weft.techniques.core.Keeper` that keeps everything where it is."""

    def __init__(self) -> None:
        self.offloaded: set[int] = set()
        """Identities of storages that would be with the host."""

    def new_state(self, shard: Shard) -> Tensor:
        """See `Keeper`."""
        state = torch.zeros_like(shard.master)
        self.offloaded.add(state.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]
        return state

    def visit(self, shards: Sequence[Shard], *, states: bool, writes: bool) -> Iterator[Sequence[Shard]]:
        """See `Keeper`."""
        yield shards

    def at_rest(self, tensor: Tensor) -> Tensor:
        """See `Keeper`."""
        return tensor

    def rest(self) -> None:
        """See `Keeper`."""
