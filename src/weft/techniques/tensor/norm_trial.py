"""Whether a module of `transformers` is a norm that ranks of a grid can share: shown by trials in fp64.

Every family has a class of its own for the same few formulas, and a name says little of what a forward does.  So the
module computes on random numbers, large and so small that its epsilon counts, and its results and gradients must be
those of the formula.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.techniques.tensor.grid_roles import Formula

_FORMULAS = (Formula("rms_norm"), Formula("layer_norm"), Formula("rms_norm", 1.0), Formula("layer_norm", 1.0))
_SCALES = (1.0, 1e-2, 1e-4)
_TOLERANCE = 1e-9
_MOST_FEATURES = 1 << 16
"""Wider parameters are no norm's."""


def epsilon_of(module: nn.Module) -> float | None:
    """Return what a norm adds to the mean square, by the names that it has in torch and transformers; None: it takes
    the least step of its input's type."""
    given: Any = getattr(module, "eps", None)
    given = getattr(module, "variance_epsilon", None) if given is None else given
    return None if given is None else float(given)


def formula_by_trial(module: nn.Module) -> Formula | None:
    """Return the formula of a norm over the last dim; None: it is none that a trial shows.

    The module may be on meta, and is left as it is.
    """
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or weight.numel() > _MOST_FEATURES or not _is_bare(module):
        return None
    return next((formula for formula in _FORMULAS if _computes(module, formula)), None)


def _is_bare(module: nn.Module) -> bool:
    """Whether it holds a weight and a bias at most."""
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return held <= {"weight", "bias"} and not any(module.named_buffers()) and not any(module.named_children())


def _computes(module: nn.Module, formula: Formula) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad(), torch.device("cpu"):
            return all(_agrees(module, formula, scale, generator) for scale in _SCALES)
    except Exception:  # it wants more than an activation, or does with it what it likes
        return False


def _agrees(module: nn.Module, formula: Formula, scale: float, generator: torch.Generator) -> bool:
    """Whether results and gradients on some random numbers are those of the formula, in training and evaluation."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    own = [*module.parameters()]
    stand_ins: dict[int, Any] = {id(each): nn.Parameter(draw(*each.shape)) for each in own}
    tried = copy.deepcopy(module, stand_ins)
    weights = [*tried.parameters()]
    x = (scale * (draw(2, 3, own[0].numel()) + 0.5)).requires_grad_()
    by = draw(2, 3, own[0].numel())
    epsilon = epsilon_of(tried)
    wanted = _normed(x, tried, formula, torch.finfo(x.dtype).eps if epsilon is None else epsilon)
    expected = [wanted, *torch.autograd.grad((wanted * by).sum(), [x, *weights])]
    for training in (True, False):
        tried.train(training)
        with _Wide():
            made = tried(x)
            found = [made, *torch.autograd.grad((made * by).sum(), [x, *weights])]
        if not all(_is_near(mine, theirs) for mine, theirs in zip(expected, found, strict=True)):
            return False
    return True


def _normed(x: Tensor, module: Any, formula: Formula, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if formula.kind == "layer_norm" else x
    scale = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    made = centred * scale * (module.weight + formula.offset)
    bias = getattr(module, "bias", None)
    return made if bias is None else made + bias


def _is_near(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or theirs.dtype != mine.dtype:
        return False
    return bool((mine - theirs).abs().max() <= _TOLERANCE * mine.abs().max())


class _Wide(TorchDispatchMode):
    """Casts of fp64 to less are none: many norms compute in fp32, where a trial would show nothing but rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        wide = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        if wide and isinstance(given.get("dtype"), torch.dtype) and given["dtype"].is_floating_point:
            given["dtype"] = torch.float64
        return func(*args, **given)
