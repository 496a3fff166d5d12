"""Modules of `transformers` that write their attention out although nothing asks for it, made to call the interface."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.attention.hf import DROPOUT_NAME, weft_attention


def calls_interface(config: Any) -> bool:
    """Whether `call_interface` makes a model of such a configuration call the attention interface."""
    if config.model_type == "xglm":
        return not config.add_cross_attention
    return config.model_type == "bloom" and not config.slow_but_exact


def call_interface(model: Any) -> None:
    """Let the attention modules of such a model attend by `weft_attention`.  Names and weights stay as they are."""
    if not calls_interface(model.config):
        return
    own, rewritten = _xglm_classes() if model.config.model_type == "xglm" else _bloom_classes()
    for module in model.modules():
        if type(module) is own:
            module.__class__ = rewritten
            rewritten.prepare(module)


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the slopes of ALiBi, fp32 (heads,): of the largest power of two p ≤ heads 2^(−8i/p), and between these as
    many more as are missing (Press et al. 2022, https://arxiv.org/abs/2108.12409)."""
    power = 2 ** math.floor(math.log2(heads))
    first = torch.arange(1, power + 1, device=device) * (-8.0 / power)
    between = (2 * torch.arange(heads - power, device=device) + 1) * (-4.0 / power)
    return torch.exp2(torch.cat([first, between]))


@functools.cache
def _xglm_classes() -> tuple[type[nn.Module], Any]:
    """XGLM's attention, and the same without products and a softmax of its own."""
    from transformers.models.xglm.modeling_xglm import XGLMAttention  # loaded where a model is one

    base: Any = XGLMAttention

    class InterfaceAttention(base):
        is_causal = True

        @staticmethod
        def prepare(module: Any) -> None:
            """Replace the dropout rate, a number in this class, by a module as other models have."""

        def forward(
            self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            query, key, value = (  # (samples, heads, tokens, size)
                layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj)
            )
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)
            rate = self.dropout if self.training else 0.0
            mixed, _ = weft_attention(self, query, key, value, attention_mask, dropout=rate, scaling=self.scaling)
            return self.out_proj(mixed.flatten(2)), None

    return base, InterfaceAttention


@functools.cache
def _bloom_classes() -> tuple[type[nn.Module], Any]:
    """BLOOM's attention, and the same with the slopes of its heads in place of what they add to every score."""
    from transformers.models.bloom.modeling_bloom import BloomAttention  # as above

    base: Any = BloomAttention

    class InterfaceAttention(base):
        is_causal = True

        @staticmethod
        def prepare(module: Any) -> None:
            setattr(module, DROPOUT_NAME, "attention_dropout")
            # Not a whole number: tensor ranks would divide it, and all would have the slopes of the first heads.
            module.slope_heads = float(module.num_heads)

        def forward(
            self,
            hidden_states: Tensor,
            residual: Tensor,
            alibi: Tensor,
            attention_mask: Tensor | None,
            layer_past: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            query, key, value = self._reshape(self.query_key_value(hidden_states))
            if layer_past is not None:
                key, value = layer_past.update(key, value, self.layer_idx)
            # `alibi` counts places without padding: less by one number for all keys of a sample, which no softmax sees.
            mixed, _ = weft_attention(
                self, query, key, value, attention_mask, scaling=self.inv_norm_factor,
                dropout=self.attention_dropout.p if self.training else 0.0,
                slopes=alibi_slopes(int(self.slope_heads), hidden_states.device),
            )  # fmt: skip
            output = F.dropout(self.dense(mixed.flatten(2)), self.hidden_dropout, self.training)
            return residual + output, None

    return base, InterfaceAttention
