"""Experts that lie stacked in a module's parameters, as mixtures of `transformers` have them.

Such a module is called with tokens, the experts that each has chosen, and what each choice counts:
`experts(tokens, choices, weights)` is Σ_j weights[t, j] · expert(choices[t, j])(tokens[t]).  That is not believed: a
small copy of the module computes in fp64 what it computes, and what two products per expert make of the same
parameters is compared with it, outputs and gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from weft.model._grouped import grouped_product, runs_of
from weft.model.reference.mixture import arrange, combine, spread

_INNER = ("_apply_gate", "act_fn", "activation_fn", "activation")
"""Methods and attributes of a module that work between the two products, in the order in which they are tried."""
_NARROW = 512
"""Widths up to this are left as they are in a small copy."""
_SMALLEST = 6
"""The least that a wider one becomes in it."""
_MOST_ELEMENTS = 2**24
"""Elements of a copy's parameters that are still a small thing."""
_TOKENS, _CHOICES = 14, 2
_TOLERANCE = 1e-11
_SCALES = (1e-3, 1e3)
"""Sizes of tokens beside 1: what a forward does to small or large numbers alone (a threshold) is seen so."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """How a module's experts compute: rows times `up`, what `inner` makes of that, times `down`."""

    num_experts: int
    up: str
    down: str
    up_bias: str
    """Parameter of (experts, width) that is added; empty: none."""
    down_bias: str
    is_transposed: bool
    """Whether matrices are (in, out), as opposed to `nn.Linear`."""
    inner: str
    """Attribute that works row by row between the products."""
    choices_first: bool = True
    """Whether the module is called with choices before their weights."""

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (n, hidden), choices (n, top_k), integers, and their weights, of a call of the module."""
        tokens, *others = (*args, *kwargs.values())
        weights, choices = sorted(others, key=lambda each: not each.is_floating_point())
        return tokens, choices, weights

    def run(self, module: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts that `module` holds make of rows (n, hidden), `counts` (its experts,) for each."""
        up, down = self._matrices(module, self.up), self._matrices(module, self.down)
        runs = runs_of(rows, counts, up, down)
        made = self._add(module, self.up_bias, grouped_product(rows, up, runs), counts)
        made = getattr(module, self.inner)(made)
        return self._add(module, self.down_bias, grouped_product(made, down, runs), counts)

    def _matrices(self, module: nn.Module, name: str) -> Tensor:
        matrices = module.get_parameter(name)
        return matrices.transpose(1, 2) if self.is_transposed else matrices

    def _add(self, module: nn.Module, name: str, made: Tensor, counts: Tensor) -> Tensor:
        if not name:
            return made
        return made + module.get_parameter(name).repeat_interleave(counts, 0, output_size=made.shape[0])

    def mix(self, module: nn.Module, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Return what the module does, where it holds all experts."""
        order, places, counts = arrange(choices, self.num_experts)
        made = self.run(module, spread(tokens, order, places), counts)
        return combine(made, weights, order, places).to(tokens.dtype)


def num_stacked(module: nn.Module) -> int:
    """Return how many experts lie stacked in a module's own parameters, by their shapes; 0: it is no such module."""
    number = getattr(module, "num_experts", None)
    own = dict(module.named_parameters(recurse=False))
    if not isinstance(number, int) or sum(tensor.dim() == 3 for tensor in own.values()) < 2:
        return 0
    return number if all(tensor.dim() > 0 and len(tensor) == number for tensor in own.values()) else 0


def prove_stacks(modules: Mapping[str, tuple[nn.Module, bool]]) -> dict[str, ExpertStack | None]:
    """Return how the experts of modules compute, each shown on a small copy; None: not as any form that is known here.

    Args:
        modules: by name, and whether each is called with choices before their weights.  They may be on the meta device,
            and stay as they are; what is drawn comes from a generator of its own.
    """
    proven: dict[Any, ExpertStack | None] = {}
    stacks: dict[str, ExpertStack | None] = {}
    for name, (module, choices_first) in modules.items():
        # Experts of all layers look the same: one proof is enough for each kind.
        key = (choices_first, *_looks_of(module))  # layers are alike
        if key not in proven:
            proven[key] = _prove(module, choices_first)
        stacks[name] = None if "forward" in vars(module) else proven[key]  # somebody has given it another one
    return stacks


def _looks_of(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    yield from ((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
    yield from ((name, type(child), str(child)) for name, child in module.named_children())
    yield from ((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))


def _prove(module: nn.Module, choices_first: bool) -> ExpertStack | None:
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            small = _small_copy(module)
        except (TypeError, ValueError, AttributeError):
            return None
        if small is None:
            return None
        for form in _forms(module, choices_first):
            if _is_proven(form, small):
                return form
    return None


def _forms(module: nn.Module, choices_first: bool) -> Iterator[ExpertStack]:
    """Every form that fits a module's shapes."""
    own = {name: tuple(tensor.shape) for name, tensor in module.named_parameters(recurse=False)}
    matrices = [name for name, shape in own.items() if len(shape) == 3]
    biases = [name for name, shape in own.items() if len(shape) == 2]
    if len(matrices) != 2 or len(biases) not in (0, 2) or len(own) != 2 + len(biases):
        return
    # Shapes alone leave several readings open: which matrix is the first, and whether it is (in, out) or (out, in).
    # Each is tried.
    for inner in (name for name in _INNER if callable(getattr(module, name, None))):
        for up, down in (matrices, matrices[::-1]):
            for up_bias, down_bias in (biases, biases[::-1]) if biases else (("", ""),):
                for transposed in (False, True):
                    yield ExpertStack(
                        len(module.get_parameter(up)),
                        up,
                        down,
                        up_bias,
                        down_bias,
                        transposed,
                        inner,
                        choices_first,
                    )


def _small_copy(module: nn.Module) -> nn.Module | None:
    """The module with narrow drawn parameters in fp64; None: it is still too large, or holds more than experts.

    Its children are copies, which can be trained.  Its other attributes are its own, but for numbers that are one of
    its widths.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters(recurse=False)}
    if any(True for child in module.children() for _ in child.parameters()) or any(True for _ in module.buffers()):
        return None  # what all experts share has not been put together with ranks that have some of them
    # A gated expert's first matrix is twice as wide as its second: narrow widths keep that.
    narrow = _narrow({width for shape in shapes.values() for width in shape[1:]})
    small = {name: (shape[0], *(narrow[width] for width in shape[1:])) for name, shape in shapes.items()}
    if sum(map(math.prod, small.values())) > _MOST_ELEMENTS:
        return None
    generator = torch.Generator().manual_seed(7)
    made = copy.copy(module)
    made.__dict__["_modules"] = {name: copy.deepcopy(child) for name, child in module.named_children()}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in small.items()}
    made.__dict__["_parameters"] = {name: nn.Parameter(tensor) for name, tensor in drawn.items()}
    for name, value in vars(module).items():
        if type(value) is int and value in narrow and name != "num_experts":
            made.__dict__[name] = narrow[value]
    return made


def _narrow(widths: set[int]) -> dict[int, int]:
    """Small widths for wide ones; what is twice another one stays so."""
    if max(widths) <= _NARROW:
        return {width: width for width in widths}
    narrow: dict[int, int] = {}
    for number, width in enumerate(sorted(widths)):
        half = narrow.get(width // 2, 0) if width % 2 == 0 else 0
        narrow[width] = 2 * half or _SMALLEST + 4 * number
    return narrow


def _is_proven(form: ExpertStack, small: nn.Module) -> bool:
    """Whether the form computes what the module does, in training and in evaluation, however it was left: where tokens
    choose among all experts, most among half of them, and all the same ones."""
    generator = torch.Generator().manual_seed(11)
    drawn = torch.rand(_TOKENS, form.num_experts, generator=generator)
    # Uneven choices: a form that drops or pads tokens of full experts would differ.
    drawn[: _TOKENS // 2, form.num_experts // 2 :] = 0.0
    # All tokens at the same experts; the others get none.
    alike = drawn[-1:].expand_as(drawn)
    top_k = min(_CHOICES, form.num_experts)
    tried = [(trains, scores, 1.0) for trains in (True, False) for scores in (drawn, alike)]
    tried += [(True, drawn, scale) for scale in _SCALES]
    return all(
        _is_equal(form, small.train(trains), scores.topk(top_k, -1).indices, generator, scale)
        for trains, scores, scale in tried
    )


def _is_equal(form: ExpertStack, small: nn.Module, chosen: Tensor, generator: torch.Generator, scale: float) -> bool:
    """Compare outputs of all tokens, those of each token by itself, and gradients."""
    width = form._matrices(small, form.up).shape[2]  # pyright: ignore[reportPrivateUsage]
    inputs = [torch.randn(_TOKENS, size, generator=generator, dtype=torch.float64) for size in (width, chosen.shape[1])]
    tokens, weights = inputs[0].mul_(scale).requires_grad_(), inputs[1].requires_grad_()
    leaves = [tokens, weights, *small.parameters(recurse=False)]
    called = (tokens, chosen, weights) if form.choices_first else (tokens, weights, chosen)
    try:
        expected: Any = type(small).forward(small, *called)
        mixed = form.mix(small, tokens, chosen, weights)
        alone = _one_by_one(form, small, tokens, chosen, weights)
    except Exception:  # a form that does not fit, or a forward that wants what the copy has not got
        return False
    if not isinstance(expected, Tensor) or expected.shape != mixed.shape or expected.dtype != mixed.dtype:
        return False
    # Gradients, too: a forward may detach what it returns, or scale its backward.
    cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    try:
        theirs, ours = (torch.autograd.grad(tensor, leaves, cotangent) for tensor in (expected, mixed))
    except RuntimeError:  # something has no gradient
        return False
    pairs = [(expected, mixed), (expected, alone), *zip(theirs, ours, strict=True)]
    return all(_is_close(one, other) for one, other in pairs)


def _one_by_one(form: ExpertStack, small: nn.Module, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Token by token: a row may depend on no other."""
    each = zip(tokens.split(1), chosen.split(1), weights.split(1), strict=True)
    return torch.cat([form.mix(small, *of) for of in each])


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _TOLERANCE * one.norm())
