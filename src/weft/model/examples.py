"""Batches on the meta device, to find shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Example = Callable[[int], dict[str, Tensor]]
"""Batch size → fields."""


def token_example(length: int, extra: Iterable[str] = ()) -> Example:
    """Tokens, labels and `extra` fields of (batch, length), all int64."""
    names = dict.fromkeys(("tokens", "labels", *extra))

    def example(batch_size: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            fields = {name: torch.zeros(batch_size, length, dtype=torch.int64) for name in names}
            return fields | {"sample_ids": torch.zeros(batch_size, dtype=torch.int64)}

    return example


def image_example(shape: Sequence[int]) -> Example:
    """Images of (batch, *shape) and one label each."""

    def example(batch_size: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            labels, sample_ids = torch.zeros(2, batch_size, dtype=torch.int64)
            return {"images": torch.zeros(batch_size, *shape), "labels": labels, "sample_ids": sample_ids}

    return example
