"""Initial weights that lie on disk, of which a rank reads only what it will hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Box = Sequence[tuple[int, int]]
"""(first, one after the last) along every dimension."""


class StoredTensor(Protocol):
    """A tensor that is read when it is asked for, whole or in part."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box | None = None) -> Tensor:
        """Return what is in the box, or all of it, in the dtype in which it is stored, on the CPU.

        It may be a view of a mapped file: copy it, and never write into it.
        """
        ...


def stored_tensors(initialise: Any) -> Mapping[str, StoredTensor]:
    """Return what an initialiser says of weights on disk, as its attribute `stored`: name in the whole model → tensor.

    `initialise` fills modules with the same values.  None where it says nothing, or is None itself.
    """
    return getattr(initialise, "stored", {})
