"""Samples that are described field by field (`Blueprint.samples`): batches of them, and values that a model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.model.examples import Example
from weft.model.families import SampleField

UNKNOWN_VALUES = 10
"""Integers of a field of which nobody says how large they may be are below this."""


def field_example(fields: Mapping[str, SampleField]) -> Example:
    """A batch of samples that are described field by field."""

    def example(batch_size: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            batch = {
                name: torch.zeros(batch_size, *field.shape, dtype=getattr(torch, field.dtype))
                for name, field in fields.items()
            }
            return batch | {"sample_ids": torch.zeros(batch_size, dtype=torch.int64)}

    return example


def draw_integers(
    field: SampleField | None, shape: Sequence[int], below: int, generator: torch.Generator | None = None
) -> Tensor:
    """Random values that a model takes, of (batch, …), int64; where the field does not say so itself, `below` this."""
    limit = below if field is None or not field.below else field.below
    values = torch.randint(0, limit, tuple(shape), generator=generator)
    return values if field is None else place_prompt(field, values)


def place_prompt(field: SampleField, values: Tensor) -> Tensor:
    """Let each sample of (batch, length) begin as its field says, with this token nowhere else; masks hide nothing."""
    if field.is_mask:
        return torch.ones_like(values)
    token, count = field.prompt
    if not count:
        return values
    others = torch.where(values == token, (token + 1) % max(2, field.below), values)
    return torch.cat([torch.full_like(others[:, :count], token), others[:, count:]], 1)
