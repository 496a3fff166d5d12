"""Calls a model as its user does: hooks of the user's that know of no keywords read what it is given by position."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn


def call_model(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Return what a model makes of its inputs, by keyword; by position as far as that goes, where hooks read these."""
    placed, named = arguments_for(module, inputs)
    return module(*placed, **named)


def arguments_for(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `call_model`, by position and by keyword."""
    attributes, placed, named = vars(module), list[Any](), dict(inputs)
    pairs = [
        (attributes[hooks], attributes[f"{hooks}_with_kwargs"]) for hooks in ("_forward_pre_hooks", "_forward_hooks")
    ]
    if any(hooks.keys() - with_keywords.keys() for hooks, with_keywords in pairs):
        for name, parameter in signature(module.forward).parameters.items():
            if name not in named or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                break
            placed.append(named.pop(name))
    return tuple(placed), named
