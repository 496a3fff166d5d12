"""What a tensor says of who sees whom, by its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

_NUMBER = "_weft_number"
NUMBERS = ("full", "zeros", "ones", "tensor", "scalar_tensor")
"""Functions that fill a new tensor with one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a mask says; without anything: that every token is seen."""

    causal: bool = False
    window: int | None = None
    hidden: float = -math.inf
    """The greatest of what is added to hidden scores, or stands in their place."""
    is_left_out: bool = False
    """Whether ranks that share a sequence make no such mask."""


def seen_in(mask: Tensor, *, added: bool, inverted: bool) -> Sight | None:
    """Return what the values of a mask (…, tokens, tokens) of one square say; None: who sees whom is neither causal nor
    full.  Of bool or of 0 and 1 it says what is seen, `inverted` what is not; `added`: of floats, 0 where it is."""
    values = mask.reshape(mask.shape[-2:])
    hidden = -math.inf
    if added:
        seen = values == 0
        hidden = float(values[~seen].max()) if not bool(seen.all()) else -math.inf
        if math.isnan(hidden):
            return None
    elif mask.dtype == torch.bool:
        seen = ~values if inverted else values
    else:
        seen = values != 0
        if not torch.equal(values, seen.to(values.dtype)):
            return None
    if bool(seen.all()):
        return Sight()
    every = torch.ones_like(seen)
    width = int(seen[-1].sum())  # of the last token, whose window is whole
    if not width or not torch.equal(seen, every.tril() & every.triu(1 - width)):
        return None
    return Sight(causal=True, window=width if width < len(seen) else None, hidden=hidden)


def is_corner(mask: Tensor, base: Tensor) -> bool:
    """Return whether a mask is the first rows and columns of a square one."""
    is_square = base.dim() > 1 and base.shape[-1] == base.shape[-2] and math.prod(base.shape[:-2]) == 1
    return is_square and mask.storage_offset() == base.storage_offset() and mask.stride()[-2:] == base.stride()[-2:]


def note_number(made: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a tensor that one of `NUMBERS` has made know the number that fills it."""
    if made.is_inference():  # of which nobody knows whether they have changed
        return
    if (number := _filled_with(name, args, kwargs)) is not None:
        setattr(made, _NUMBER, (number, made._version))


def _filled_with(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    match name:
        case "zeros":
            return 0.0
        case "ones":
            return 1.0
        case "full":
            return plain_number(args[1] if len(args) > 1 else kwargs.get("fill_value"))
        case _:
            return plain_number(args[0] if args else kwargs.get("data", kwargs.get("s")))


def plain_number(given: Any) -> float | None:
    """Return a number of Python's; None: it is none."""
    return float(given) if isinstance(given, int | float) else None


def number_of(given: Any) -> float | None:
    """Return a number, or the one that a tensor is filled with; None: it is something else."""
    if not isinstance(given, Tensor):
        return plain_number(given)
    number, version = getattr(given, _NUMBER, (None, -1))
    if number is None or version != given._version:
        return None
    if given.is_meta or type(given) is not Tensor:
        return number
    # `.data` may be written without a trace; who follows the forward need not see that it is looked at.
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return number if bool((given == number).all()) else None
