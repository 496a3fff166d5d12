"""What must be equal on all ranks when they prepare a model."""

from __future__ import annotations

import torch
from torch import nn

from weft.entry._user_batches import BatchStream
from weft.entry._user_optimizer import settings_of


def facts_of_prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer, stream: BatchStream, max_grad_norm: float | None
) -> dict[str, str]:
    """Return them by name: data, classes, parameters and the optimizer's settings."""
    kind = type(model).__name__
    facts = {
        "data: the number of samples in the loader": str(stream.num_samples),
        "data: the global batch": str(stream.batch_size),
        "the class of the model": kind,
        "the class of the optimizer": type(optimizer).__name__,
        "max_grad_norm": str(max_grad_norm),
    }
    facts |= {
        f"{kind}.{name}": f"{tuple(p.shape)}, {p.dtype}, {p.requires_grad}" for name, p in model.named_parameters()
    }
    return facts | settings_of(optimizer)
