"""What ranks are given when they prepare a model: what must be equal on all, and the loader's first batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weft.api.batches.generators import generators_kept
from weft.api.batches.stream import BatchStream, UserBatch
from weft.api.saving.optimizer import settings_of
from weft.errors import DataError


def facts_of_prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, stream: BatchStream, max_grad_norm: float | None
) -> dict[str, str]:
    """Return them by name: data, classes, parameters and the optimizer's settings."""
    facts = {
        "data: the number of samples in the loader": str(stream.num_samples),
        "data: the global batch": str(stream.batch_size),
        "max_grad_norm": str(max_grad_norm),
    }
    return facts | facts_of_model(model, optimizer)


def facts_of_model(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Return those of a model, and of its optimizer."""
    kind = type(model).__name__
    facts = {"the class of the model": kind}
    if optimizer is not None:
        facts["the class of the optimizer"] = type(optimizer).__name__
    facts |= {
        f"{kind}.{name}": f"{tuple(p.shape)}, {p.dtype}, {p.requires_grad}" for name, p in model.named_parameters()
    }
    return facts if optimizer is None else facts | settings_of(optimizer)


def first_batch_of(loader: Iterable[UserBatch]) -> UserBatch:
    """Return a loader's first batch; no generator moves.

    Raises:
        DataError: it is an iterator, or yields no batch.
    """
    with torch.random.fork_rng(devices=[]), generators_kept(loader):  # a loader's iterator draws a seed
        is_iterator = iter(loader) is loader
        first = None if is_iterator else next(iter(loader), None)
    if is_iterator:
        raise DataError(
            f"the loader is an iterator ({type(loader).__name__}), which can be gone through only once. Give an"
            " iterable: a DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )
    if first is None:
        raise DataError("the loader yields no batch. Give it data, or a smaller batch size.")
    return first
