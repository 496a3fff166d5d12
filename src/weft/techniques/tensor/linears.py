"""Which modules are linear layers whose weight is cut."""

from __future__ import annotations

from torch import nn


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Hugging Face's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")
