"""Gather and reduce values over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.accelerate._stepping import Accumulating
from weft.accelerate.utils import operations


class ProcessGathers(Accumulating):
    """`gather` and its like, and triggers."""

    def gather(self, tensor: Any) -> Any:
        """Return what all processes have, in their order, along dim 0: of what has a row for each sample, the global
        batch; of numbers, one for each process."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of the global batch, in its order, and none twice.

        What has as many rows as the loader's batch, or as a process's of a whole batch (a loss that was repeated),
        counts for the samples of this process.
        """
        if use_gather_object or not _is_of_tensors(input_data):
            return operations.gather_values(input_data)
        cut = self._own_samples()
        if self._job.is_alone:
            return operations.recursively_apply(cut, input_data)
        return operations.gather_in(self._job, input_data, cut)

    def _own_samples(self) -> Callable[[Tensor], Tensor]:
        """Return this process's rows without fillers."""
        batch, loader = self._job.inside.batch, self.gradient_state.active_dataloader
        plain = operations.own_rows(self._job)
        if batch is None or loader is None:
            return plain
        own, whole = batch.stop - batch.start, loader.total_batch_size

        def cut(tensor: Tensor) -> Tensor:
            rows = len(tensor) if tensor.ndim > 0 else 0
            is_repeated = whole is not None and rows in (whole, -(-whole // self.num_processes)) and rows > own > 0
            return tensor[:own] if is_repeated else plain(tensor)

        return cut

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, or the mean, over processes of tensors."""
        return operations.reduce_in(self._job, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False) -> Any:
        """Make tensors as long along a dim as those of the process that has the longest."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Let `check_trigger` say yes, once, on every process."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether some process has set the trigger."""
        own, self._is_triggered = self._is_triggered, False
        is_triggered = bool(self._job.session.all_reduce(torch.tensor(float(own)), "max"))
        self._is_triggered = own and not is_triggered
        return is_triggered

    _is_triggered = False


def _is_of_tensors(data: Any) -> bool:
    try:
        operations.tensors_of(data)
    except TypeError:
        return False
    return True
