"""Seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from weft.accelerate._job import take_seed
from weft.errors import RecipeError


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, and what models draw in training.

    All processes have the same seed: what is drawn for a sample follows from its place, so that it is drawn once,
    whatever the number of processes.
    """
    if device_specific:
        raise RecipeError(
            "set_seed(device_specific=True) gives each process numbers of its own, and losses would depend on how many"
            " there are. Leave it out: what is drawn for a sample differs from every other's anyway."
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    take_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: Any = None, generator: Any = None) -> None:
    """Nothing is left to do: loaders draw from rank 0's generators, and models by sample."""


def synchronize_rng_states(rng_types: Any, generator: Any = None) -> None:
    """Nothing is left to do: loaders draw from rank 0's generators, and models by sample."""
