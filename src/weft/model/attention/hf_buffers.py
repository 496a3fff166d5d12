"""What buffers of tokens × tokens hold once a model of transformers is initialised: who sees whom, it may be."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from weft.model.seeding import seeded


def square_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the values of buffers of one square, by name: of those on the meta device, what the class's initialisation
    puts there.  Left out are those that it does not fill."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if not _is_square(buffer):
                continue
            value = _initial(model, name, module, leaf) if buffer.is_meta else buffer
            if value is not None:
                found[f"{name}.{leaf}" if name else leaf] = value
    return found


def _is_square(buffer: Tensor) -> bool:
    return buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] > 1 and math.prod(buffer.shape[:-2]) == 1


def _initial(model: nn.Module, name: str, module: nn.Module, leaf: str) -> Tensor | None:
    """What is there whatever was there before."""
    rules = _innermost(model, name)
    if rules is None:
        return None
    made: list[Tensor] = []
    for before in (0, 1):
        # Only its own buffers are real: whatever else the rules draw is on the meta device, and costs nothing.
        probe = copy.copy(module)
        probe.__dict__["_buffers"] = {
            each: None if buffer is None else torch.full_like(buffer, before, device="cpu")
            for each, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        }
        try:
            with seeded(0), torch.no_grad():
                rules._init_weights(probe)
        except Exception:  # rules may ask of a module what only the whole has
            return None
        made.append(getattr(probe, leaf))
    return made[0] if torch.equal(*made) else None


def _innermost(model: nn.Module, path: str) -> Any:
    """The model whose rules are those of a module."""
    found: Any = None
    parts = path.split(".") if path else []
    for depth in range(len(parts) + 1):
        inner = model.get_submodule(".".join(parts[:depth]))
        found = inner if hasattr(inner, "_init_weights") else found
    return found


def count_places(module: nn.Module) -> None:
    """Give buffers of places the values that they have in transformers, 0, 1, …, for there are none on the meta
    device."""
    for name, buffer in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf == "position_ids" and buffer.is_meta and buffer.dtype == torch.int64 and buffer.dim() in (1, 2):
            setattr(module.get_submodule(owner), leaf, torch.arange(buffer.shape[-1]).expand(buffer.shape))
