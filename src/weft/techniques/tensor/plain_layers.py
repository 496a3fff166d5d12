"""What layers say of themselves: which are linear, and what counts heads and widths."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from weft.errors import PlanError
from weft.models import Tables, number_of, set_number


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def localise(part: nn.Module, tables: Tables, parts: int, *, is_grid: bool = False) -> None:
    """Divide the attributes that count something split over tensor ranks into so many parts; a shared module once.

    `is_grid`: not those of modules that every rank of a row computes whole.

    Raises:
        PlanError: a number that cannot be divided.
    """
    done: set[tuple[int, str]] = set()
    for name, module in part.named_modules():
        for entry in tables.localise:
            if not fnmatchcase(name, entry.match) or (id(module), entry.attribute) in done:
                continue
            if is_grid and tables.is_computed_whole(name):
                continue
            value = number_of(module, entry.attribute)
            if value is None:
                continue
            if not isinstance(value, int) or value % parts:
                raise PlanError(
                    f"{name}.{entry.attribute} = {value} cannot be divided into {parts} parts, as plan.mesh.tensor"
                    " asks. Use a size that can, or tensor = 1."
                )
            set_number(module, entry.attribute, value // parts)
            done.add((id(module), entry.attribute))
