"""`nn.TransformerEncoder` evaluated by ranks that hold parts of it: layer by layer, with the results of its fused path.

Without gradients torch packs samples that are padded at their ends, runs fused kernels on the whole weights of a layer,
and returns zeros at the padded positions.  Ranks that hold parts of layers, or some of the layers, run these one by one
and put the zeros there themselves, before the last norm.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def run_encoders_by_layers(part: nn.Module) -> None:
    """Let every `nn.TransformerEncoder` of `part` run its layers one by one, with the results of its fused path."""
    for module in part.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            _ByLayers(module)


class _ByLayers:
    """Hooks of one encoder, and what they know of the forward that is under way."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._signature = inspect.signature(encoder.forward)
        self._padded: Tensor | None = None
        encoder.use_nested_tensor = False
        encoder.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if encoder.norm is not None:
            encoder.norm.register_forward_pre_hook(self._clear_before_norm)
        else:
            encoder.register_forward_hook(self._clear)

    def _enter(self, encoder: nn.Module, args: Any, kwargs: Any) -> None:
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._padded = _packed(encoder, arguments["src"], arguments.get("mask"), arguments.get("src_key_padding_mask"))

    def _clear_before_norm(self, norm: nn.Module, args: Any) -> Any:
        return (self._cleared(args[0]), *args[1:])

    def _clear(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        return self._cleared(output)

    def _cleared(self, activation: Tensor) -> Tensor:
        return activation if self._padded is None else activation.masked_fill(self._padded.unsqueeze(-1), 0.0)


def _packed(encoder: Any, source: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """The padded positions (samples, tokens), where torch would pack the others; else None."""
    first = encoder.layers[0]
    if padding is None or mask is not None or source.dim() != 3 or source.is_meta or first.training:
        return None
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled() and (source.requires_grad or any(p.requires_grad for p in first.parameters())):
        return None
    padded = padding if padding.dtype == torch.bool else padding.isneginf()
    return None if encoder.mask_check and not _ends_in_padding(source, padded) else padded


def _ends_in_padding(source: Tensor, padded: Tensor) -> bool:
    """Whether torch would say so of every sample."""
    ask: Any = torch._nested_tensor_from_mask_left_aligned  # pyright: ignore[reportPrivateUsage]
    return ask(source, padded.logical_not())
