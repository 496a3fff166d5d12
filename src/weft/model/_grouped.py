"""Products of runs of rows with a matrix each: one kernel where the device has one, else run by run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.model.derivatives import is_differentiated

Runs = list[int] | Tensor
"""Lengths of the runs, or their ends as the kernel takes them: int32, on the device."""

_ALIGNED = 8
"""Elements of bf16 that the kernel wants in a row, and in multiples of them."""


def runs_of(rows: Tensor, counts: Tensor, *matrices: Tensor) -> Runs:
    """Return what `grouped_product` takes for runs of `counts` rows, for products with all these stacks of matrices.

    The kernel is torch's, of accelerators, bf16 and widths of 16 bytes: it reads the ends on the device, so that nobody
    waits.
    A description on the meta device sees it, too.  Rows without numbers (of a trial on meta) are shared out evenly.
    """
    if counts.is_meta or type(counts) is not Tensor:
        each, more = divmod(rows.shape[0], counts.shape[0])
        return [each + (index < more) for index in range(counts.shape[0])]
    fits = all(width % _ALIGNED == 0 for matrix in matrices for width in matrix.shape[1:])
    if rows.is_meta or (rows.device.type != "cpu" and rows.dtype is torch.bfloat16 and fits):
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
        if is_differentiated():
            pairs = [(slice(*run), matrix) for run, matrix in zip(_borders(ctx.runs), matrices.unbind(), strict=True)]
            by_matrix = [grad[run].t() @ rows[run] for run, _ in pairs]
            return torch.cat([grad[run] @ matrix for run, matrix in pairs]), torch.stack(by_matrix), None
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
