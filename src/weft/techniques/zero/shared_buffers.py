"""`fully_shard`'s buffers in the memory that the ranks of one host share.

A unit's weights are copied into one buffer and gathered there, its gradients into another and scattered from there.
In ordinary memory a collective over shared memory copies them once more, into staging memory; in the group's own the
others read them where they lie.  The sums are made in the same order, so results are the same to the last bit.  And the
memory of a buffer is used again by the next, where the allocator of the CPU takes new pages for each large one.

torch lets a unit bring collectives of its own along (`set_custom_all_gather`, `set_custom_reduce_scatter`); a torch
without them stages.  Its other way, `set_allocate_memory_from_process_group_for_comm`, asks the backend in C++, of
which a process group in Python has only Gloo's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from weft.comm.device import all_gather_single, reduce_scatter_single
from weft.comm.memory import new_flat
from weft.comm.mesh import GroupView
from weft.comm.shared_memory import shared_memory_group


def share_buffers(module: FSDPModule, view: GroupView) -> None:
    """Let a unit that is sharded over `view` use buffers in shared memory.  Call on every rank of the group alike.

    Nothing happens where something else carries the group, or torch has no such setting.
    """
    unit: Any = module
    if shared_memory_group(view.group) is None or not hasattr(unit, "set_custom_reduce_scatter"):
        return
    unit.set_custom_all_gather(_Gather(view))
    unit.set_custom_reduce_scatter(_Scatter(view))


class _Gather:
    """What `fully_shard` asks of an all-gather; a part of its output is its input."""

    def __init__(self, view: GroupView) -> None:
        self._view = view

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return new_flat(math.prod(size), dtype, device, self._view).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return all_gather_single(output_tensor, input_tensor, group, async_op=async_op)


class _Scatter:
    """What it asks of a reduce-scatter, whose input only the others read: the output is the gradient, which stays."""

    def __init__(self, view: GroupView) -> None:
        self._view = view
        self._given = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An input, then the output of as many elements as each rank gets of it."""
        count = math.prod(size)
        if count * self._view.size == self._given:
            self._given = 0
            return torch.empty(*size, dtype=dtype, device=device)
        self._given = count
        return new_flat(count, dtype, device, self._view).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, group, op=op, async_op=async_op)
