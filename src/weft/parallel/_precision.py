"""What a plan's precision means for weights, masters and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.plan import Plan

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
