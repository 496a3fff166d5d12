"""What blocks keep for their backward, in a place other than the device."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class ActivationStore(Protocol):
    """Takes what the backward of the block that computes will need, and gives it back then."""

    def pack(self, tensor: Tensor) -> Any:
        """Return what stands for a tensor that leaves; None: it stays where it is."""
        ...

    def watch(self, tensor: Tensor) -> Tensor:
        """Return a tensor without memory that counts the same writes."""
        ...

    def fetch(self, value: Any) -> Any:
        """Return the tensor for which something stands; anything else as it is."""
        ...
