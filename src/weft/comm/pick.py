"""What starts a group's collectives: the backend's own, or algorithms that a plan names."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.comm.device import sends_messages
from weft.comm.flat import Collectives
from weft.comm.mesh import GroupView
from weft.errors import PlanError


def collectives_for(
    view: GroupView, device: torch.device, algorithm: str = "auto", *, folder: Path | None = None
) -> Collectives:
    """Return what carries collectives of a device's tensors over a group.  Call on every rank of the group alike.

    Algorithms that are named send messages over Gloo, also in a group whose ranks share memory, which goes on to carry
    everything else in it.  They, and all that knows them, are imported only where a plan names one.

    Args:
        algorithm: as in a plan.  `auto` is what Weft does without a choice, always the same.  `measured` takes the
            table kept of such a group in `folder` (by default below ~/.cache/weft), as the first rank reads it.  Where
            the links have drifted since, that rank warns; the choices stay.

    Raises:
        PlanError: an algorithm is named for an accelerator, whose library chooses itself; `measured`, and nothing has
            been.
    """
    if algorithm != "auto" and device.type != "cpu":
        raise PlanError(
            f'plan.data_parallel.algorithm = "{algorithm}" cannot be run on {device.type}: on CUDA NCCL chooses. '
            'Use "auto".'
        )
    if algorithm == "auto" or view.group is None or not sends_messages(device, view.group):
        return Collectives(view)  # also in a dry run, whose group carries nothing
    from weft.comm._choose import measured_collectives, named_collectives

    return measured_collectives(view, folder) if algorithm == "measured" else named_collectives(view, algorithm)
