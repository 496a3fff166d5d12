"""Functions that only rank 0 calls."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from weft.run.launch import RankInfo

R = TypeVar("R")


def rank_zero_only(function: Callable[..., R]) -> Callable[..., R | None]:
    """Return a function that does nothing on other ranks."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> R | None:
        info = RankInfo.from_environment()
        rank = dist.get_rank() if dist.is_initialized() else 0 if info is None else info.rank
        return function(*args, **kwargs) if rank == 0 else None

    return called


@rank_zero_only
def rank_zero_info(*values: Any) -> None:
    """Write to the log."""
    logging.getLogger("weft.fabric").info(*values)


@rank_zero_only
def rank_zero_warn(message: str, stacklevel: int = 3, category: type[Warning] = UserWarning) -> None:
    """Warn of something."""
    warnings.warn(message, category, stacklevel=stacklevel)
