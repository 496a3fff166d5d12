"""Experts of mixtures, each module of them one event of a forward: what they make of a token is known by proof.

Experts sort tokens, which look then as if they met.  What `weft.model.stacked` has shown of a module is that it gives
each token the weighted results of the experts that the token has chosen, whoever else is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from weft.analysis.trace._fused import FusedCall
from weft.model.blueprint import Blueprint
from weft.model.stacked import ExpertStack, num_stacked, prove_stacks


def mix_by_token(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Stand for experts in a trace: rows (n, hidden), choices and weights (n, top_k) → (n, hidden)."""
    inputs = (tokens, choices, weights)
    made: Tensor = handle_torch_function(mix_by_token, inputs, *inputs)
    return made


def as_event(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    """How a trace runs it."""
    return FusedCall(run=lambda: torch.empty_like(args[0]), name="experts", operands=args, settings={})


def proven_stacks(blueprint: Blueprint) -> Mapping[str, ExpertStack]:
    """Return the modules of stacked experts of which it is shown what they do, whichever operands come first."""
    if blueprint.stacks:
        return blueprint.stacks
    proven: dict[str, ExpertStack] = {}
    stacked = {name: module for name, module in blueprint.module.named_modules() if num_stacked(module) > 1}
    for choices_first in (True, False):
        left = {name: (stack, choices_first) for name, stack in stacked.items() if name not in proven}
        proven |= {name: stack for name, stack in prove_stacks(left).items() if stack is not None}
    return proven


def stand_in_for_experts(module: nn.Module, stacks: Mapping[str, ExpertStack]) -> None:
    """Record each call of proven experts, in a copy of the model, as one event."""
    for name, stack in stacks.items():
        each: Any = module.get_submodule(name)
        each.forward = partial(_called, each.forward, stack)


def _called(forward: Any, stack: ExpertStack, *args: Any, **kwargs: Any) -> Any:
    inputs: list[Any] = [*args, *kwargs.values()]
    if not _fits(inputs, stack):
        return forward(*args, **kwargs)  # which is followed as anything else
    return mix_by_token(*stack.operands(args, kwargs))


def _fits(inputs: list[Any], stack: ExpertStack) -> bool:
    """Whether a call is one of tokens, and of choices and weights in their order, for the same rows."""
    if len(inputs) != 3 or not all(isinstance(value, Tensor) and value.dim() == 2 for value in inputs):
        return False
    tokens, second, third = inputs
    choices, weights = (second, third) if stack.choices_first else (third, second)
    kinds = [argument.is_floating_point() for argument in (tokens, choices, weights)]
    return kinds == [True, False, True] and len(tokens) == len(choices) and choices.shape == weights.shape
