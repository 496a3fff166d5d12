"""Shape and dtype of a model's samples, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SampleField:
    """One field of one sample."""

    shape: tuple[int, ...]
    dtype: Literal["int64", "float32"]
    below: int = 0
    """Integers are in [0, below); 0: nobody says."""
    prompt: tuple[int, int] = (0, 0)
    """(token, count): a sample begins with `count` of this token, which stand for an image, and has no others."""
    follows: tuple[str, int] | None = None
    """(field, start): this field is the other one moved right by one place, behind `start`.  What a file does not give
    is made so."""
    is_mask: bool = False
    """Ones where a sample has something, zeros where it was filled up.  Samples of files may leave it out: all ones."""
