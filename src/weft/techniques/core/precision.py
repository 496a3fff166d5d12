"""What a plan's precision means for weights, masters and gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from weft.config.plan import Plan

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes to compute in, beside which optimizers update masters in fp32."""
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """`compute`: what the model runs in.  `master`: what optimizers update.  `gradient`: what gradients are summed
    in."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, plan: Plan) -> Dtypes:
        compute = _DTYPES[plan.compute.precision]
        master = torch.promote_types(compute, torch.float32)
        return cls(compute, master, compute if plan.data_parallel.reduces_narrow else master)


def real_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real and the imaginary parts of a complex one, and any other as it is."""
    return dtype.to_real() if dtype.is_complex else dtype


def main_dtype(module: nn.Module) -> torch.dtype:
    """Return the floating dtype in which most of a model's trained elements are, of complex ones that of their parts;
    of a model that has none, of all its parameters, or torch's default."""
    for trained in (True, False):
        elements: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            if (parameter.is_floating_point() or parameter.is_complex()) and (parameter.requires_grad or not trained):
                elements[real_of(parameter.dtype)] += parameter.numel()
        if elements:
            return elements.most_common(1)[0][0]
    return torch.get_default_dtype()


def dtype_beside(dtype: torch.dtype, main: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """Return what becomes of a dtype where a model given in `main` is to be in `compute`, fp32 or fp64: what was in
    another dtype than the rest was so for a reason, and stays."""
    if real_of(dtype) != main:
        return dtype
    return compute.to_complex() if dtype.is_complex else compute
