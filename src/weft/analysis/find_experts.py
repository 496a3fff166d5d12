"""Finds the experts of mixtures that say nothing of themselves, from forwards of the model, for ranks to share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.analysis.trace._events import Trace
from weft.analysis.trace._trace import Mode, trace
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.meta_forward import copy_on_meta


@dataclass(slots=True)
class _ExpertsCall:
    """A module of stacked experts as the forward calls it."""

    module: nn.Module
    problem: str = "is not called"
    choices_first: bool = True

    def see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs: list[Any] = [*args, *kwargs.values()]
        if self.problem != "is not called":
            self.problem = "is called more than once"
        elif len(inputs) != 3 or not all(isinstance(value, Tensor) and value.dim() == 2 for value in inputs):
            self.problem = "is not called with tokens, choices and their weights"
        else:
            self.problem = _unlike(inputs)
            self.choices_first = not inputs[1].is_floating_point()


def _unlike(inputs: list[Tensor]) -> str:
    """Return the problem with tokens, and with choices and weights in any order; empty: none."""
    tokens, *others = inputs
    kinds = sorted(other.is_floating_point() for other in others)
    if not tokens.is_floating_point() or kinds != [False, True]:
        return "is not called with tokens, integers that choose, and their weights"
    if any(other.shape[0] != tokens.shape[0] for other in others) or others[0].shape != others[1].shape:
        return "is called with choices or weights of other tokens"
    return ""


def look_at_experts(blueprint: Blueprint) -> None:
    """Find the experts of a model of `transformers` that ranks can share out, where nothing names them. Writes into the
    blueprint how they compute (`Blueprint.stacks`), or why ranks cannot share them out. A module of one's own may do
    with its parameters what no forward shows, so its experts stay whole.

    Enters into the blueprint how they compute (`Blueprint.stacks`), or why ranks cannot share them out.  A module of
    one's own may do with its parameters what no forward shows, so it is made of `weft.model.reference.mixture.Mixture`.
    """
    is_known = blueprint.stacks or "expert" in blueprint.limits
    is_of_library = type(blueprint.module).__module__.startswith("transformers.")
    if is_known or not is_of_library or all(parameter.dim() < 3 for parameter in blueprint.module.parameters()):
        return
    from weft.model.hf import register  # models of one's own may need nothing of transformers

    register()  # a factory has made the model, it may be
    try:
        _look(blueprint)
    except RecipeError as problem:
        blueprint.limit("expert", f"its forward could not be followed ({str(problem).rstrip('.')})")


def _look(blueprint: Blueprint) -> None:
    from weft.model.stacked import num_stacked, prove_stacks  # loaded where there is something to prove

    modules = {name: module for name, module in blueprint.module.named_modules() if num_stacked(module) > 1}
    if not modules:
        return
    calls, evaluated = _calls(blueprint, modules, "as it is"), _calls(blueprint, modules, "evaluation")
    proven = prove_stacks({name: (module, calls[name].choices_first) for name, module in modules.items()})
    for name, module in modules.items():
        kind = type(module).__name__
        if problem := calls[name].problem or _only_in_evaluation(calls[name], evaluated[name]):
            blueprint.limit("expert", f"{name}, a {kind}, {problem}")
            return
        if proven[name] is None:
            blueprint.limit("expert", f"nothing shows that {name}, a {kind}, is two products per expert")
            return
    blueprint.stacks = {name: stack for name, stack in proven.items() if stack is not None}


def _calls(blueprint: Blueprint, modules: Mapping[str, nn.Module], mode: Mode) -> dict[str, _ExpertsCall]:
    """How a forward calls these modules, and reads their parameters."""
    calls, copied = {name: _ExpertsCall(module) for name, module in modules.items()}, copy_on_meta(blueprint.module)
    for name, call in calls.items():
        copied.get_submodule(name).register_forward_pre_hook(call.see, with_kwargs=True)
    seen = trace(replace(blueprint, module=copied), torch.float32, loss=False, modes=(mode,))
    for name, call in calls.items():
        call.problem = call.problem or _read_elsewhere(seen, name)
    return calls


def _only_in_evaluation(training: _ExpertsCall, evaluation: _ExpertsCall) -> str:
    if evaluation.problem:
        return f"{evaluation.problem} in evaluation"
    is_alike = training.choices_first == evaluation.choices_first
    return "" if is_alike else "is called with choices and weights in another order in evaluation"


def _read_elsewhere(seen: Trace, name: str) -> str:
    """Whether something outside of a module reads its parameters: it would meet those of one rank."""
    own = {storage for storage, names in seen.parameters.items() if any(each.startswith(f"{name}.") for each in names)}
    for event in seen.events:
        is_inside = event.module == name or event.module.startswith(f"{name}.")
        if not is_inside and any(value.storage in own for value in event.inputs):
            return f"has parameters that {event.module or 'the forward'} reads"
    return ""
