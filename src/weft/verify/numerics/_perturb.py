"""Initial weights that hide nothing.

Biases start at zero and norms at one.  A bias that is added once per rank, or a norm that is cut wrongly, is then right
in the first step, and its gradient too.  A check therefore moves such parameters off their constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.config.recipe import Precision
from weft.model.blueprint import Blueprint

_SPREAD = 0.1
_LAST_DIGIT: Mapping[Precision, float] = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Distance from 1 to the next number."""


def perturb_constants(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint with noise on every parameter that would start constant, the same under every plan."""
    return _after_drawing(blueprint, _add_noise_if_constant)


def nudge_weights(blueprint: Blueprint, precision: Precision, *, draw: int = 0) -> Blueprint:
    """Return the blueprint with every weight moved by its last digit in `precision`, up or down, without rounding it.

    In fp64 that shows how far a rounding inside of the model carries, and in `precision` how far any rounding does.
    `draw` numbers the draws of ups and downs.
    """

    @torch.no_grad()
    def nudge(name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
        del generator
        if parameter.is_floating_point():
            signs = 2.0 * torch.randint(2, parameter.shape, generator=_generator(f"{draw} {name}")).double() - 1.0
            # In fp64, whatever it is drawn in: the last digit of fp64 would be lost in fp32.
            parameter.data = parameter.double() * (1 + signs * _LAST_DIGIT[precision])

    return _after_drawing(blueprint, nudge)


_Change = Callable[[str, Tensor, torch.Generator | None], None]
"""Changes a parameter, given its name and a generator; None: torch's default one, which is seeded for its module."""


def _generator(name: str) -> torch.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _after_drawing(blueprint: Blueprint, change: _Change) -> Blueprint:
    """Change every parameter once it has its initial weights, in the same way under every plan."""
    original = blueprint.initialise
    if original is None:
        for name, parameter in blueprint.module.named_parameters():
            change(name, parameter, _generator(name))
        return blueprint

    def initialise(name: str, module: nn.Module) -> None:
        original(name, module)
        for leaf, parameter in module.named_parameters(recurse=False):
            change(f"{name}.{leaf}", parameter, None)

    return replace(blueprint, initialise=initialise)


@torch.no_grad()
def _add_noise_if_constant(name: str, parameter: Tensor, generator: torch.Generator | None) -> None:
    del name
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    flat = parameter.reshape(-1)
    if bool((flat == flat[0]).all()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.add_(noise.to(parameter.dtype), alpha=_SPREAD)
