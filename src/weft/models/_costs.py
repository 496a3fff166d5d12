"""Floating-point operations of transformers, by the usual counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerCost:
    """Sizes that decide the cost of one sample.

    A multiply-add is two operations; backward costs twice the forward; attention is counted without the causal half.
    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix.
    """

    num_layers: int
    block_weights: int
    """Elements of one block's matrices."""
    attention_size: int
    """Heads times head size."""
    head_weights: int
    """Elements of the matrices after the last block."""
    sequence_length: int

    @property
    def block_flops(self) -> float:
        """Forward of one block on one sample."""
        length = self.sequence_length
        return 2.0 * self.block_weights * length + 4.0 * self.attention_size * length * length

    @property
    def head_flops(self) -> float:
        return 2.0 * self.head_weights * self.sequence_length

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward of one sample."""
        return 3.0 * (self.num_layers * self.block_flops + self.head_flops)

    @property
    def block_costs(self) -> Sequence[float]:
        """Relative forward cost of [stem, block 0, …, tail]; one block is 1, looking up an embedding is nearly free."""
        return [0.05, *[1.0] * self.num_layers, self.head_flops / self.block_flops]
