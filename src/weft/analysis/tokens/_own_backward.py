"""Backwards that no forward shows."""

from __future__ import annotations

from torch import nn

_KNOWN = ("torch", "transformers", "weft")
"""Packages whose modules do in their backward what follows from their forward."""


def own_backward(model: nn.Module) -> str:
    """Return why the backward of a model may be another than its forward shows: a sentence without its end; empty: it
    is what follows from it."""
    for name, module in model.named_modules():
        what = f"{name or 'the model'}, a {type(module).__name__},"
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        hooks = module._backward_hooks or module._backward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        if hooks or any(tensor._backward_hooks for tensor in tensors):
            return f"{what} has hooks on its backward"
        if type(module).__module__.partition(".")[0] not in _KNOWN:
            return f"{what} is of one's own, and may do in its backward what no forward shows"
    return ""
