"""Operators of feed-forward layers: dense, and mixtures of routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.model.profile._parts import STATISTIC_BYTES, linear
from weft.model.profile._profile import Operator, OperatorSplit
from weft.model.profile._sizes import ModelSizes

_INDEX_BYTES = 4


def dense_operators(sizes: ModelSizes, width: int, prefix: str = "ffn") -> Iterator[Operator]:
    """Up (and gate), activation, down, of one dense layer or of the shared experts."""
    inner = 2 * width if sizes.is_gated else width
    yield linear(f"{prefix}.up", inner, sizes.hidden_size, "column", bias=sizes.ffn_bias)
    yield _activation(sizes, width, f"{prefix}.activation", "column")
    yield linear(f"{prefix}.down", sizes.hidden_size, width, "row", bias=sizes.ffn_bias)


def mixture_operators(sizes: ModelSizes) -> Iterator[Operator]:
    """Router, dispatch, experts, combination, and the shared experts beside them."""
    hidden, width, top_k = sizes.hidden_size, sizes.expert_ffn_size, sizes.top_k
    inner = 2 * width if sizes.is_gated else width
    router = linear("moe.router", sizes.num_experts, hidden, "sequence", bias=sizes.router_bias)
    yield replace(router, kept_bytes_per_token=sizes.num_experts * STATISTIC_BYTES + top_k * _INDEX_BYTES)
    yield _movement("moe.dispatch", hidden, top_k)
    yield _experts("moe.up", sizes, inner, hidden)
    yield _activation(sizes, width, "moe.activation", "expert", top_k)
    yield _experts("moe.down", sizes, hidden, width)
    combine = _movement("moe.combine", hidden, top_k)
    # The router's weights scale the experts' activations before their last product, so that its results need not be
    # kept; where they scale the results, these are.
    yield replace(combine, kept_elements_per_token=0, unfused_elements_per_token=top_k * hidden)
    if sizes.shared_ffn_size:
        yield from dense_operators(sizes, sizes.shared_ffn_size, "moe.shared")
    if sizes.shared_gate:
        yield linear("moe.shared_gate", 1, hidden, "sequence")


def _activation(sizes: ModelSizes, width: int, name: str, split: OperatorSplit, copies: int = 1) -> Operator:
    """Keeps what goes in and, for the matmul behind it, what comes out.  ReLU's backward needs its result only."""
    entering = {"swiglu": 2, "geglu": 2, "gelu": 1, "relu": 0, "squared_relu": 1}[sizes.activation]
    moved = (3 if sizes.is_gated else 2) * width
    return Operator(
        name=name,
        kind="elementwise",
        split=split,
        elements_moved_per_token=copies * moved,
        kept_elements_per_token=copies * (entering + 1) * width,
        # Separate kernels keep the activated gate for the product, or the rectified input for the square.
        unfused_elements_per_token=copies * width if sizes.is_gated or sizes.activation == "squared_relu" else 0,
        selective=True,
    )


def _experts(name: str, sizes: ModelSizes, n: int, k: int) -> Operator:
    one = linear(name, n, k, "expert", bias=sizes.ffn_bias, rows=sizes.top_k)
    return replace(one, groups=sizes.num_experts, parameters=sizes.num_experts * one.parameters)


def _movement(name: str, hidden: int, top_k: int) -> Operator:
    """Tokens to their experts or back; keeps the copies, which the experts need."""
    return Operator(
        name=name,
        kind="gather",
        split="expert",
        elements_moved_per_token=2 * top_k * hidden,
        kept_elements_per_token=top_k * hidden,
        kept_bytes_per_token=top_k * _INDEX_BYTES,
    )
