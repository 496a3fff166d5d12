"""Dtypes of a user's model under a plan: what stays as it was given, and what a plan cannot train so."""

from __future__ import annotations

import torch
from torch import nn

from weft.api.saving.optimizer import cuts_of
from weft.config.plan import Plan
from weft.errors import RecipeError
from weft.techniques.core.precision import NARROW, main_dtype


def check_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuse dtypes in which plain PyTorch would train, and the plan would not.

    Raises:
        RecipeError: names the first parameter, and what to write.
    """
    precision, main = plan.compute.precision, main_dtype(model)
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if (name := next((name for name, each in trained if each.is_complex()), None)) is not None:
        if precision not in ("fp32", "fp64"):
            raise RecipeError(
                f"{name} is complex, and torch has no complex numbers of {precision}. Use compute.precision = fp32."
            )
        if cuts_of(optimizer) != "anywhere":
            raise RecipeError(
                f"{name} is complex, and a {type(optimizer).__name__} may look at more than its parts one by one. Keep"
                f" {name} as torch.view_as_real of it and call torch.view_as_complex in the forward, or use an"
                " optimizer such as torch.optim.AdamW."
            )
    if precision not in ("fp32", "fp64"):
        return
    narrow = next(((name, each.dtype) for name, each in trained if each.dtype in NARROW), None)
    if narrow is not None:
        name, kind = narrow[0], str(narrow[1]).removeprefix("torch.")
        short = "bf16" if narrow[1] is torch.bfloat16 else "fp16"
        raise RecipeError(
            f"{name} is {kind} and to be trained, and the plan's precision is {precision}, which would train it"
            f" otherwise than PyTorch does. Give prepare model.float(), or permit {short} (weft.session(permit="
            f'("{short}",)), compute.precision = "{short}"), which computes in {kind} beside weights in fp32.'
        )
    if main is torch.float64 and precision == "fp32":
        name = next(name for name, each in trained or model.named_parameters() if each.dtype is torch.float64)
        raise RecipeError(
            f"{name} is float64 as most of the model is, and the plan's precision fp32 would round it. Give prepare"
            ' model.float(), or permit fp64 (weft.session(permit=("fp64",)), compute.precision = "fp64").'
        )


def casts_inputs(model: nn.Module, plan: Plan) -> bool:
    """Whether the plan computes in another dtype than the model was given in, so that inputs follow it."""
    return {"fp32": torch.float32, "fp64": torch.float64}.get(plan.compute.precision) != main_dtype(model)
