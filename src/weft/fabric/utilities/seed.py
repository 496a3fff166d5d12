"""One seed for all generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from weft.errors import RecipeError
from weft.fabric._absent import absent
from weft.fabric.utilities.rank_zero import rank_zero_info

_LARGEST = 2**32 - 1


def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
    """Seed Python's, numpy's and torch's generators, equally on all ranks, and return the seed (0 if none is given).

    Of models and loaders that are set up from then on it is that of dropout, and of what data sets draw, too.

    Raises:
        RecipeError: numpy takes no such seed.
    """
    del workers
    seed = 0 if seed is None else int(seed)
    if not 0 <= seed <= _LARGEST:
        raise RecipeError(f"seed = {seed} is not between 0 and {_LARGEST:,}, where numpy's are.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if verbose:
        rank_zero_info("seed set to %d", seed)
    return seed


__getattr__ = absent(
    __name__,
    {
        "Call seed_everything with the seed.": "reset_seed",
        "Use torch.random.fork_rng.": "isolate_rng",
        "Leave it out: workers' draws are keyed by sample.": "pl_worker_init_function",
    },
)
