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
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from weft.techniques.tensor.mesh_2d.shape import Formula

_FORMULAS = (Formula("rms_norm"), Formula("layer_norm"), Formula("rms_norm", 1.0), Formula("layer_norm", 1.0))
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
"""Tried where no attribute says one."""
_WIDTH = 12
"""Features that a norm without weights is tried on, where it has no width of its own."""
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
    if not _is_bare(module) or not 0 < width_of(module) <= _MOST_FEATURES:
        return None
    formulas = _FORMULAS if next(module.parameters(), None) is not None else _FORMULAS[:2]
    if epsilon_of(module) is None:
        formulas = (*formulas, *(each._replace(epsilon=size) for each in formulas for size in _EPSILONS))
    return next((formula for formula in formulas if _computes(module, formula)), None)


def width_of(module: nn.Module) -> int:
    """Return how many features a norm over the last dim has; 0: it is none."""
    weight: Any = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None) if weight is None else weight.shape
    if isinstance(shape, int):
        return shape
    if shape is None:
        return _WIDTH
    return int(shape[0]) if len(shape) == 1 else 0


def _is_bare(module: nn.Module) -> bool:
    """Whether it holds a weight and a bias at most."""
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return held <= {"weight", "bias"} and not any(module.named_buffers()) and not any(module.named_children())


def _computes(module: nn.Module, formula: Formula) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        with _disable_current_modes(), torch.enable_grad(), torch.device("cpu"):  # a dry run's tensors have no values
            return all(_agrees(module, formula, scale, generator) for scale in _SCALES)
    except Exception:  # it wants more than an activation, or does with it what it likes
        return False


def _agrees(module: nn.Module, formula: Formula, scale: float, generator: torch.Generator) -> bool:
    """Whether results and gradients on some random numbers are those of the formula, in training and evaluation."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    own, width = [*module.parameters()], width_of(module)
    stand_ins: dict[int, Any] = {id(each): nn.Parameter(draw(*each.shape)) for each in own}
    tried = copy.deepcopy(module, stand_ins)
    weights = [*tried.parameters()]
    x = (scale * (draw(2, 3, width) + 0.5)).requires_grad_()
    by = draw(2, 3, width)
    epsilon = epsilon_of(tried) if formula.epsilon is None else formula.epsilon
    wanted = _normed(x, tried, formula, torch.finfo(x.dtype).eps if epsilon is None else epsilon)
    expected = [wanted, *torch.autograd.grad((wanted * by).sum(), [x, *weights])]
    for training in (True, False):
        tried.train(training)
        with TriedOperators(_OF_NORMS):
            made = tried(x)
        found = [made, *torch.autograd.grad((made * by).sum(), [x, *weights])]
        if not all(is_near(mine, theirs) for mine, theirs in zip(expected, found, strict=True)):
            return False
    return True


def _normed(x: Tensor, module: Any, formula: Formula, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if formula.kind == "layer_norm" else x
    scale = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    made = centred * scale if weight is None else centred * scale * (weight + formula.offset)
    return made if bias is None else made + bias


def is_near(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape or theirs.dtype != mine.dtype:
        return False
    return bool((mine - theirs).abs().max() <= _TOLERANCE * mine.abs().max())


LAYOUTS = frozenset({
    "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "t", "permute", "detach", "alias",
})  # fmt: skip
"""Operators that only lay values out otherwise."""
_OF_NORMS = LAYOUTS | {
    "pow", "square", "mean", "sum", "var", "var_mean", "std", "sqrt", "rsqrt", "reciprocal", "linalg_vector_norm",
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "neg", "clone", "native_layer_norm",
    "rms_norm", "_fused_rms_norm", "_to_copy", "copy_", "empty", "empty_like", "scalar_tensor", "lift_fresh",
}  # fmt: skip


class TriedOperators(TorchDispatchMode):
    """Lets a forward that is tried use some operators only: none with a threshold, of which random numbers may show
    nothing.  Casts of fp64 to fp32 are none: many norms compute in it, where a trial would show nothing but rounding.
    Narrower ones are refused, as they would be hidden, too.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self._allowed = allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), str(func.overloadpacket.__name__)
        if name not in self._allowed:
            raise UntriedError(name)
        wide = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        dtype = given.get("dtype")
        if wide and isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            if dtype not in (torch.float32, torch.float64):
                raise UntriedError(f"{name} to {dtype}")
            given["dtype"] = torch.float64
        return func(*args, **given)


class UntriedError(Exception):
    """An operator of which a trial shows too little."""
