"""Initial weights of the reference models, module by module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from weft.model.blueprint import Initialiser

NORMAL_STD = 0.02


def normal_initialiser(*, residual_outputs: Sequence[str], num_layers: int) -> Initialiser:
    """Matrices and embeddings from N(0, 0.02²), biases zero, norms one.

    The matrices that write into the residual stream (globs `residual_outputs`) are narrower by sqrt(2 · num_layers), so
    that the stream's variance does not grow with depth.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    narrow = NORMAL_STD / math.sqrt(2 * num_layers)

    @torch.no_grad()
    def initialise(name: str, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            is_output = any(fnmatchcase(name, pattern) for pattern in residual_outputs)
            module.weight.normal_(0.0, narrow if is_output else NORMAL_STD)
            bias = getattr(module, "bias", None)
            if bias is not None:
                bias.zero_()
        else:
            module_default(name, module)

    return initialise


@torch.no_grad()
def module_default(name: str, module: nn.Module) -> None:
    """PyTorch's own initial weights of a module, by its `reset_parameters`."""
    reset = getattr(module, "reset_parameters", None)
    assert callable(reset), f"{name} ({type(module).__name__}) has tensors of its own and no reset_parameters"
    reset()
