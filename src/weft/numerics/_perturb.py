"""Initial weights that hide nothing.

Biases start at zero and norms at one.  A bias that is added once per rank, or a norm that is cut wrongly, is then right
in the first step, and its gradient too.  A check therefore moves such parameters off their constants.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.models import Blueprint

_SPREAD = 0.1


def perturb_constants(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint with noise on every parameter that would start constant, the same under every plan."""
    original = blueprint.initialise
    if original is None:
        for name, parameter in blueprint.module.named_parameters():
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            _stir(parameter, torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
        return blueprint

    def initialise(name: str, module: nn.Module) -> None:
        original(name, module)
        for parameter in module.parameters(recurse=False):
            _stir(parameter, None)  # from the default generator, which is seeded for this module

    return replace(blueprint, initialise=initialise)


@torch.no_grad()
def _stir(parameter: Tensor, generator: torch.Generator | None) -> None:
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    flat = parameter.reshape(-1)
    if bool((flat == flat[0]).all()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.add_(noise.to(parameter.dtype), alpha=_SPREAD)
