"""Every optimizer of a recipe over whole tensors: torch's own where torch has it, else as its paper writes it.

They share nothing with Weft's sharded optimizers, neither code nor order of computation, so that a mistake there shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.config.recipe import OptimizerRecipe

Groups = Sequence[dict[str, Any]]
"""Parameter groups of torch's optimizers, with `weight_decay`; the caller sets `lr` before each step."""


def plain_optimizer(settings: OptimizerRecipe, groups: Groups) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over whole parameters."""
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=_or(settings.epsilon, 1e-8))
        case "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum, nesterov=settings.nesterov)
        case name:
            return _PaperOptimizer(groups, settings, _RULES[name])


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


Rule = Callable[[OptimizerRecipe, dict[str, Any], dict[str, Any], Tensor, Tensor], None]
"""`rule(settings, group, state, parameter, gradient)`: one update of one parameter, in place."""


class _PaperOptimizer(torch.optim.Optimizer):
    """Applies a rule parameter by parameter; one without a gradient is left alone, as by torch."""

    def __init__(self, groups: Groups, settings: OptimizerRecipe, rule: Rule) -> None:
        super().__init__(groups, {"lr": 1.0})
        self._rule = rule
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  no closure here
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    self._rule(self._settings, group, state, parameter, parameter.grad)


def _lamb(settings: OptimizerRecipe, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> None:
    """You et al. 2020, algorithm 2."""
    (beta1, beta2), step = settings.betas, state["step"]
    state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
    size = (state["v"] / (1 - beta2**step)).sqrt() + _or(settings.epsilon, 1e-6)
    update = state["m"] / (1 - beta1**step) / size + group["weight_decay"] * w
    w -= group["lr"] * _ratio(settings, w, float(w.norm()), float(update.norm())) * update


def _lars(settings: OptimizerRecipe, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> None:
    """You, Gitman and Ginsburg 2017, algorithm 1, with their trust coefficient."""
    norm, slope, decay = float(w.norm()), float(g.norm()), group["weight_decay"]
    rate = _ratio(settings, w, 0.001 * norm, slope + decay * norm if slope > 0 else 0.0)
    moved = group["lr"] * rate * (g + decay * w)
    state["v"] = settings.momentum * state.get("v", torch.zeros_like(w)) + moved
    w -= state["v"]


def _ratio(settings: OptimizerRecipe, w: Tensor, above: float, below: float) -> float:
    """1 where either is 0, and for biases and norms unless decay touches them too."""
    is_adapted = w.dim() >= 2 or settings.decay_one_dimensional
    return above / below if is_adapted and above > 0 and below > 0 else 1.0


def _adafactor(settings: OptimizerRecipe, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> None:
    """Shazeer and Stern 2018, algorithm 4 for matrices and 5 for vectors; factored over the last two dims."""
    step, rate = state["step"], group["lr"]
    squares = g * g + _or(settings.epsilon, 1e-30)
    newest = step**-0.8
    if w.dim() >= 2:
        rows = _moved(state, "rows", squares.mean(-1), newest)
        columns = _moved(state, "columns", squares.mean(-2), newest)
        update = g / (rows.unsqueeze(-1) * columns.unsqueeze(-2) / rows.mean(-1)[..., None, None]).sqrt()
    else:
        update = g / _moved(state, "whole", squares, newest).sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    if settings.relative_step:
        rate = min(rate, 1 / math.sqrt(step)) * max(1e-3, float(w.square().mean().sqrt()))
    w -= rate * group["weight_decay"] * w + rate * update


def _moved(state: dict[str, Any], name: str, value: Tensor, newest: float) -> Tensor:
    """A moving average, which the first step sets (its weight is 1)."""
    state[name] = (1 - newest) * state.get(name, torch.zeros_like(value)) + newest * value
    return state[name]


_RULES: Mapping[str, Rule] = {"lamb": _lamb, "lars": _lars, "adafactor": _adafactor}
