"""State that data ranks hold copies of and no optimizer updates: compared over the ranks, now and then."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.api.guards.guards import Modes
from weft.api.ranks.agreement import LEFT
from weft.techniques.build import ParallelModel

_REGULARLY = 1_000
"""Steps between two looks, once powers of two are far apart."""


class CopiedState:
    """What ranks must agree on in a step of their models: modes, and after steps 1, 2, 4, 8, … the buffers and frozen
    parameters that a forward or the loop has changed since they were prepared."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._modes = Modes(model.module, model.plan)
        mesh, own = model.plan.mesh, model.mesh
        is_copied = mesh.data == mesh.world_size and model.summing.size("data") == own.size("data")
        self._saved = frozenset(model.module.state_dict(keep_vars=True)) if is_copied else frozenset[str]()
        self._first = {name: _state(value) for name, value in self._held().items()} if is_copied else {}

    def facts(self, steps: int) -> dict[str, str]:
        """What must be equal, by name, after so many steps."""
        modes = self._modes.facts()
        is_due = steps > 0 and (steps & (steps - 1) == 0 or steps % _REGULARLY == 0)
        if not is_due or not self._first:
            return modes
        changed = {name: each for name, each in self._held().items() if _state(each) != self._first.get(name)}
        return modes | {f"{LEFT}{name}": _digest(value) for name, value in changed.items()}

    def _held(self) -> dict[str, Tensor]:
        module = self._model.module
        held = {name: each for name, each in module.named_buffers() if name in self._saved}
        held |= {name: each for name, each in module.named_parameters() if not each.requires_grad}
        return {name: each for name, each in held.items() if not isinstance(each, DTensor)}


def _state(value: Tensor) -> tuple[int, int]:
    """What differs once it was written to."""
    return value.data_ptr(), value._version  # pyright: ignore[reportPrivateUsage]  # what autograd goes by


def _digest(value: Tensor) -> str:
    held = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{tuple(value.shape)} {xxhash.xxh3_64_hexdigest(held.numpy().data)}"
