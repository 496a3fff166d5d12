"""Tensors as the engine sees them: dense memory of the CPU, by address and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.shared_memory._call import Region
from weft.errors import CollectiveError

CopyBack = Sequence[tuple[Tensor, Tensor]]
"""Contiguous copies that were worked on instead of the caller's tensors: (the caller's, the copy)."""


def check_memory(tensor: Tensor) -> None:
    """What lies elsewhere has no address that a copy could start from."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        kind = f"on {tensor.device}" if tensor.device.type != "cpu" else f"of layout {tensor.layout}"
        raise CollectiveError(
            f"a tensor {kind} cannot be sent over shared memory, which carries dense tensors of the CPU. Use a group of"
            f" the device's own backend."
        )


def region(flat: Tensor) -> Region:
    return flat.data_ptr(), flat.numel() * flat.itemsize


def is_as_stored(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one after another as they are: a conjugate may be but a mark on a view."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def contiguous(tensor: Tensor) -> tuple[Tensor, CopyBack]:
    check_memory(tensor)
    if is_as_stored(tensor):
        return tensor, ()
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    return flat, [(tensor, flat)]
