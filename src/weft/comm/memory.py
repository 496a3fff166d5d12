"""Memory for what is sent often: where ranks share memory, collectives need not copy it there first."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.shared_memory import shared_memory_group


def new_flat(num_elements: int, dtype: torch.dtype, device: torch.device, view: GroupView) -> Tensor:
    """Return an uninitialised flat tensor for collectives over `view`: in the memory that its ranks share, as far as
    there is some, else as `torch.empty` makes it.

    Results are the same either way.  Let go of it (and of its views) before the group ends: until then the group's
    memory stays.
    """
    shared = shared_memory_group(view.group) if device.type == "cpu" else None
    shared_tensor = shared.allocate_if_possible(num_elements, dtype) if shared is not None else None
    return shared_tensor if shared_tensor is not None else torch.empty(num_elements, dtype=dtype, device=device)
