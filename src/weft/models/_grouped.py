"""Products of runs of rows with a matrix each: one kernel where the device has one, else run by run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Runs = list[int] | Tensor
"""Lengths of the runs, or their ends as the kernel takes them: int32, on the device."""


def runs_of(rows: Tensor, counts: Tensor) -> Runs:
    """Return what `grouped_product` takes for runs of `counts` rows; the same for all products of those rows.

    The kernel is torch's, of accelerators and bf16: it reads the ends on the device, so that nobody waits.
    """
    if rows.device.type not in ("cpu", "meta") and rows.dtype is torch.bfloat16:
        return counts.cumsum(0, dtype=torch.int32)
    return counts.tolist()


def grouped_product(rows: Tensor, matrices: Tensor, runs: Runs) -> Tensor:
    """Return (n, out): rows (n, in) times the transposed matrix of their run, of `matrices` (groups, out, in).

    Every matrix gets a gradient; that of a run without rows is zero.
    """
    if isinstance(runs, Tensor):
        return F.grouped_mm(rows, matrices.transpose(-2, -1), offs=runs)
    product: Any = _RunByRun.apply(rows, matrices, runs)
    return product


class _RunByRun(torch.autograd.Function):
    """One node, whose backward writes each matrix's gradient where it belongs: slices would each make a whole one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, runs: list[int]) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.runs = runs
        result = rows.new_empty(rows.shape[0], matrices.shape[1])
        for index, (start, end) in enumerate(_borders(runs)):
            if end > start:
                torch.mm(rows[start:end], matrices[index].t(), out=result[start:end])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, matrices = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        for index, (start, end) in enumerate(_borders(ctx.runs)):
            if grad_matrices is not None and end == start:
                grad_matrices[index].zero_()
            elif grad_matrices is not None:
                torch.mm(grad[start:end].t(), rows[start:end], out=grad_matrices[index])
            if grad_rows is not None and end > start:
                torch.mm(grad[start:end], matrices[index], out=grad_rows[start:end])
        return grad_rows, grad_matrices, None


def _borders(runs: list[int]) -> list[tuple[int, int]]:
    borders: list[tuple[int, int]] = []
    start = 0
    for length in runs:
        borders.append((start, start + length))
        start += length
    return borders
