"""Second derivatives: a penalty on gradients, forces of an energy, Hessians.

A backward that a loss differentiates runs with gradients enabled, and torch records what it does.  What a collective or
a kernel of Weft's own does is not recorded: its second derivative would be left out without a word.  So every
`torch.autograd.Function` here either says how its backward is differentiated, or refuses to run it then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from weft.errors import PlanError

Backward = TypeVar("Backward", bound=Callable[..., Any])


def is_differentiated() -> bool:
    """Whether the backward in hand may be differentiated itself (`create_graph=True`)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def once(what: str, instead: str) -> Callable[[Backward], Backward]:
    """Mark the backward of an `autograd.Function` that has no derivative.

    `what` computes it, and `instead` is the change to make.  The marked backward raises a `PlanError`, which says both,
    where it would be differentiated.
    """

    def mark(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if is_differentiated():
                raise PlanError(
                    f"a backward is differentiated once more (create_graph=True, as of a penalty on gradients), and"
                    f" {what} has no second derivative: it would be left out. {instead}"
                )
            return backward(ctx, *gradients)

        return cast(Backward, run)

    return mark
