"""Linear layers whose frozen weights are held in 8 or 4 bits, and multiplied as the numbers that these stand for.

`int8`: a row is whole numbers from -127 to 127, times one fp32 scale.  `nf4`: two weights in a byte, each one of 16
levels (quantiles of a normal distribution), times an fp32 scale for every 64 inputs of a row.  Source: Dettmers et al.
2023, section 3, https://arxiv.org/abs/2305.14314; levels and packing are those of the package bitsandbytes.

Activations are not quantised.  The weights of a layer are there in the dtype of its input for as long as it computes,
in the forward and once more in the backward, and never those of two layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.recipe import BaseKind

_BLOCK = 64
_LEAST_BLOCKS = 8
"""Layers narrower than those of practice have shorter blocks, so that tensor ranks share them as they do wide ones."""
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 levels of NormalFloat4 (Dettmers et al. 2023, QLoRA, arXiv 2305.14314): quantiles of a normal distribution."""


def block_of(in_features: int) -> int:
    """Inputs of a row that have a scale of their own in `nf4`; 0: there can be none, for there is an odd number."""
    size = _BLOCK
    # Halved until the row has whole blocks, and enough of them to be shared out.
    while size > 1 and (in_features % size or in_features // size < _LEAST_BLOCKS):
        size //= 2
    return size if size > 1 else 2 * (in_features % 2 == 0)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer, its weights as codes.  `weight` computes them; nothing keeps what it returns.

    Scales are held as the bits of fp32 numbers, so that no cast of a model to bf16 rounds them.
    """

    codes: nn.Parameter
    """(out, in) int8, or (out, in / 2) uint8."""
    scale_bits: nn.Parameter
    """(out, 1) or (out, in / block) int32."""

    def __init__(self, like: nn.Linear, kind: BaseKind) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = like.in_features, like.out_features, kind
        rows, width, device = like.out_features, like.in_features, like.weight.device
        if kind == "int8":
            codes = torch.empty(rows, width, dtype=torch.int8, device=device)
        else:
            codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=device)
        # int8: one scale per row, the largest absolute weight over 127. nf4: one per block of inputs.
        scales = 1 if kind == "int8" else width // block_of(width)
        self.codes = nn.Parameter(codes, requires_grad=False)
        bits = torch.empty(rows, scales, dtype=torch.int32, device=device)
        self.scale_bits = nn.Parameter(bits, requires_grad=False)
        bias: Any = like.bias
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        bias: Any = self.bias
        return dequantised(self.codes, self.scale_bits, torch.float32 if bias is None else bias.dtype)

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Take the codes of a whole weight."""
        codes, scales = _int8(weight.float()) if self.kind == "int8" else _nf4(weight.float())
        self.codes.data.copy_(codes)
        self.scale_bits.data.copy_(scales.contiguous().view(torch.int32))

    def cut_dims(self, *, column: bool) -> Mapping[str, int]:
        """Dim along which tensor ranks cut each parameter; what is not named is whole on each."""
        if column:
            return {"codes": 0, "scale_bits": 0, "bias": 0}
        return {"codes": 1} if self.kind == "int8" else {"codes": 1, "scale_bits": 1}

    def product(self, x: Tensor) -> Tensor:
        """Return the layer's result without its bias."""
        return _QuantisedProduct.apply(x, self.codes, self.scale_bits)

    def forward(self, input: Tensor) -> Tensor:
        made = self.product(input)
        bias: Any = self.bias
        return made if bias is None else made + bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class _QuantisedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale_bits: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale_bits)
        return F.linear(x, dequantised(codes, scale_bits, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        codes, scale_bits = ctx.saved_tensors
        # (…, out) · (out, in): the weights are made from the codes once more, which is cheaper to keep than the
        # weights.
        return grads[0] @ dequantised(codes, scale_bits, grads[0].dtype), None, None


def dequantised(codes: Tensor, scale_bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (out, in) that codes stand for, a rank's part of them or all."""
    scales = scale_bits.view(torch.float32)
    if codes.dtype == torch.int8:
        return (codes.float() * scales).to(dtype)
    # A byte has the codes of two neighbouring inputs, the first in its upper half.
    pairs = [(_LEVELS[byte >> 4], _LEVELS[byte & 15]) for byte in range(256)]
    values = torch.tensor(pairs, device=codes.device)[codes.int()].flatten(1)
    blocks = values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return blocks.flatten(1).to(dtype)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = _not_zero(weight.abs().amax(1, keepdim=True)) / 127
    return (weight / scales).round().to(torch.int8), scales


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, block_of(weight.shape[1])))
    scales = _not_zero(blocks.abs().amax(2))
    levels = torch.tensor(_LEVELS, device=weight.device)
    # The nearest level: borders lie half way between levels.
    nearest = torch.bucketize(blocks / scales[..., None], (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return nearest[:, ::2] << 4 | nearest[:, 1::2], scales


def _not_zero(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest, 1.0)
