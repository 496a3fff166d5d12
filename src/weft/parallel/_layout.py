"""How each parameter and buffer of a rank's model part lies in the whole model.

Parameters stay plain local tensors while they train: the user's forward then runs unchanged on local shapes, a fused
query-key-value can be cut block by block (which no DTensor placement says), and no dispatch stands in the hot path.
The layout is kept beside them, by name, and is what checkpoints, clipping and optimizers read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """A cut over the tensor axis: dimension `dim` is `blocks` equal blocks, each cut in `parts`; this rank has
    `index`."""

    dim: int
    parts: int
    index: int
    blocks: int = 1

    def local_shape(self, shape: torch.Size) -> torch.Size:
        sizes = list(shape)
        sizes[self.dim] //= self.parts
        return torch.Size(sizes)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, contiguous and with storage of its own."""
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(self.parts, self.dim)[self.index] for block in blocks], self.dim).contiguous()

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the whole tensor from the parts of all ranks, in rank order."""
        per_rank = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([piece[block] for block in range(self.blocks) for piece in per_rank], self.dim).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter or buffer of this rank."""

    name: str
    """Name in the whole, unsplit model; of a tied parameter, its first name."""
    shape: torch.Size
    """Whole shape."""
    split: TensorSplit | None = None
    tensor_partial: bool = False
    """Replicated over the tensor axis, but each rank's gradient is only its part of the sum (norms under sequence
    parallelism, the bias of nothing else)."""
    tied: bool = False
    """Shared between pipeline stages on different ranks: gradients are summed over them, and only one counts in
    norms."""
    counts: bool = True
    """Whether this rank's copy is the one that norms and checkpoints count (first of the replicas over tensor and
    tied stages; data replicas are not looked at here)."""
    is_buffer: bool = False


@dataclass(slots=True)
class ModelLayout:
    """Layouts by the name under which the tensor is found in the part."""

    entries: dict[str, ParameterLayout] = field(default_factory=dict[str, ParameterLayout])

    def __getitem__(self, name: str) -> ParameterLayout:
        return self.entries[name]
