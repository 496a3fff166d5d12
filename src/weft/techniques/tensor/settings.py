"""Settings of tensor and sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.settings import setting

TensorScheme = Literal["1d", "2d", "2.5d", "3d"]


@dataclass(frozen=True, kw_only=True)
class TensorSettings:
    """The section `tensor_parallel`."""

    scheme: TensorScheme = setting(
        "1d", layout="tensor_scheme", space="tensor_schemes", asked=("scheme",), axis="tensor"
    )
    """How many dimensions a matrix is cut in over the tensor ranks: `2d` needs a square of them, `2.5d` several layers
    of one (8: 2 layers of 2 × 2), `3d` a cube."""
    sequence: bool = setting(
        False,
        layout="sequence_parallel",
        space="sequence_parallels",
        asked=("sequence", "sequence_parallel"),
        axis="tensor",
    )
    """Keep activations split along the sequence between the split layers (Megatron's sequence parallelism)."""
