"""A loss that is a sum over samples, where a mean is wanted: it is known by how it was computed."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

_MOST_NODES = 32
"""Steps of a computation that are looked at: what makes a loss of its terms is short."""
_SUM = 2
"""What torch's losses keep of `reduction="sum"`."""
_JOINING = ("Add", "Sub", "Neg", "Mul", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone")
_SMALL = 0.1
"""A factor below this may be what divides by the number of samples."""


def is_sum_over_samples(loss: Tensor) -> bool:
    """Whether every term of a loss is a sum that nothing divides.  False where it cannot be told."""
    waiting: list[Any] = [loss.grad_fn]
    sums = 0
    for _ in range(_MOST_NODES):
        if not waiting:
            return sums > 0
        node = waiting.pop()
        if node is None or _is_divided(node):
            return False
        if _is_sum(node):
            sums += 1
        elif node.name().removesuffix("0").startswith(tuple(f"{each}Backward" for each in _JOINING)):
            waiting += [each for each, _ in node.next_functions if each is not None]
        else:
            return False
    return False


def warn_of_sum(loss: Tensor, ranks: int) -> None:
    """Say what a sum would be taken for, on so many data ranks."""
    if is_sum_over_samples(loss):
        warnings.warn(
            "the loss is a sum over samples, and session.backward(loss) takes it for a mean over this rank's: on"
            f" {ranks} data ranks gradients are {ranks} times smaller than those of one process. Write"
            " session.backward(loss, reduction='sum'), or divide the loss by len(x).",
            stacklevel=4,
        )


def _is_sum(node: Any) -> bool:
    if hasattr(node, "_saved_reduction"):
        return node._saved_reduction == _SUM
    # A product may have weights that add up to 1.
    made = node.next_functions[0][0] if node.next_functions else None
    return node.name().startswith("SumBackward") and not (made is not None and made.name().startswith(("Mul", "Div")))


def _is_divided(node: Any) -> bool:
    """Whether a product is with a number that may be what divides, or with something that is not known."""
    if not node.name().startswith("MulBackward"):
        return False
    saved = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
    factors = [each for each in saved if each is not None]
    return any(each.numel() != 1 or abs(float(each)) < _SMALL for each in factors)
