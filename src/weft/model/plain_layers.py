"""Facts of layers by their attributes: which are linear, and which attributes count heads and widths."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from weft.errors import PlanError
from weft.model.families import Tables
from weft.model.localising import number_of, set_number


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def runs(module: nn.Module, *forwards: Callable[..., Any]) -> bool:
    """Whether a module's forward is one of these, and nobody has given this very module another one."""
    return type(module).forward in forwards and "forward" not in vars(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def localise(part: nn.Module, tables: Tables, parts: int) -> None:
    """Divide the attributes that count something split over tensor ranks into so many parts; a shared module once.

    Raises:
        PlanError: a number that cannot be divided.
    """
    done: set[tuple[int, str]] = set()
    for name, module in part.named_modules():
        for attribute in (entry.attribute for entry in tables.localise if fnmatchcase(name, entry.match)):
            value = None if (id(module), attribute) in done else number_of(module, attribute)
            if value is None:
                continue
            if not isinstance(value, int) or value % parts:
                raise PlanError(
                    f"{name}.{attribute} = {value} cannot be divided into {parts} parts, as plan.mesh.tensor"
                    " asks. Use a size that can, or tensor = 1."
                )
            set_number(module, attribute, value // parts)
            done.add((id(module), attribute))
