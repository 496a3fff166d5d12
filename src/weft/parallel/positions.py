"""Calls a model as its user does: hooks of the user's that know of no keywords read what it is given by position."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def call_model(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return what a model makes of its inputs, by keyword; by position as far as that goes, where hooks read these."""
    if not _reads_positions(module):
        return module(**inputs)
    rest, placed = dict(inputs), list[Any]()
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if name not in rest or parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        placed.append(rest.pop(name))
    return module(*placed, **rest)


def _reads_positions(module: nn.Module) -> bool:
    hooks = vars(module)
    before = hooks["_forward_pre_hooks"].keys() - hooks["_forward_pre_hooks_with_kwargs"].keys()
    after = hooks["_forward_hooks"].keys() - hooks["_forward_hooks_with_kwargs"].keys()
    return bool(before or after)
