"""Calls a model as its user does: hooks of the user's that know of no keywords read what it is given by position."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def call_model(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return what a model makes of its inputs, by keyword; by position as far as that goes, where hooks read these."""
    placed, named = arguments_for(module, inputs)
    return module(*placed, **named)


def arguments_for(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `call_model` gives, by position and by keyword."""
    placed, named = list[Any](), dict(inputs)
    if _reads_positions(module):
        for name, parameter in inspect.signature(module.forward).parameters.items():
            if name not in named or parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                break
            placed.append(named.pop(name))
    return tuple(placed), named


def _reads_positions(module: nn.Module) -> bool:
    hooks = vars(module)
    before = hooks["_forward_pre_hooks"].keys() - hooks["_forward_pre_hooks_with_kwargs"].keys()
    after = hooks["_forward_hooks"].keys() - hooks["_forward_hooks_with_kwargs"].keys()
    return bool(before or after)
