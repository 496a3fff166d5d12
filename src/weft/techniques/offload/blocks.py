"""Offloaded activations on a rank: around the forwards of a part's blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from weft.formatting import format_bytes
from weft.techniques.core import ModelPart, StepContext, is_own
from weft.techniques.offload.activations import ActivationKeeper
from weft.techniques.offload.depot import Depot, FileDepot, HostDepot
from weft.techniques.offload.place import new_file, return_what_is_freed, where
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class OffloadedActivations(TechniqueRuntime):
    """What blocks keep for their backward, elsewhere until then.

    It goes around recomputation: of a block that is computed again, its input leaves, and under `selective` the results
    that are kept.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self.keeper = ActivationKeeper(build.mesh.device, self._depot)
        build.context.activation_store = self.keeper

    def wrap(self, part: ModelPart) -> None:
        blueprint = self._build.blueprint
        for name in blueprint.cut.blocks if blueprint.cut is not None else ():
            if is_own(part.module, blueprint, name):
                block = part.module.get_submodule(name)
                block.forward = partial(_offloaded, self.keeper, self._build.context, block, block.forward)

    def _depot(self) -> Depot:
        device = self._build.mesh.device
        if device.type == "cpu":
            return_what_is_freed()
        return FileDepot(new_file(self._build, 0), device) if self._goes_to_disk else HostDepot(device)

    @property
    def _goes_to_disk(self) -> bool:
        return self._build.plan.memory.offloads_to_disk

    def notes(self) -> list[str]:
        size = format_bytes(self.keeper.peak_bytes)
        return [f"at most {size} of activations are {where(self._build)} until their backward"]

    def close(self) -> None:
        self.keeper.close()


def _offloaded(
    keeper: ActivationKeeper,
    context: StepContext,
    block: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with keeper.within(context.current, chain(block.parameters(), block.buffers())):
        return forward(*args, **kwargs)
