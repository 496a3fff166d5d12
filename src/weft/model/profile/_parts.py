"""Operators that every transformer has."""

from __future__ import annotations

from weft.model.profile._profile import Operator, OperatorSplit
from weft.model.profile._sizes import ModelSizes

STATISTIC_BYTES = 4
"""Means, deviations and log-sums are kept in fp32."""
_INDEX_BYTES = 8


def norm(
    name: str, sizes: ModelSizes, *, width: int | None = None, split: OperatorSplit = "sequence", feeds: bool = True
) -> Operator:
    """A norm over `width` features (the hidden size).  `feeds`: whether its result is the input of a matmul, which that
    keeps; else it goes into a sum, which keeps nothing."""
    features = width or sizes.hidden_size
    is_rms = sizes.norm == "rms"
    return Operator(
        name=name,
        kind="elementwise",
        split=split,
        parameters=features * sizes.norm_width,
        elements_moved_per_token=2 * features,
        kept_elements_per_token=(2 if feeds else 1) * features,
        kept_bytes_per_token=STATISTIC_BYTES if is_rms else 2 * STATISTIC_BYTES,
        # Root-mean-square norms made of separate kernels keep an fp32 copy of their input or of its quotient besides.
        unfused_bytes_per_token=4 * features if is_rms else 0,
        selective=True,
    )


def residual(name: str, sizes: ModelSizes) -> Operator:
    """Dropout, if any, and the sum with what went around.  The sum itself is kept by the norm that takes it."""
    hidden = sizes.hidden_size
    return Operator(
        name=name,
        kind="elementwise",
        split="sequence",
        elements_moved_per_token=3 * hidden,
        kept_bytes_per_token=hidden if sizes.dropout else 0,
        dropout=sizes.dropout > 0,
        selective=True,
    )


def linear(
    name: str, n: int, k: int, split: OperatorSplit, *, bias: bool = False, kept: float = 0.0, rows: float = 1.0
) -> Operator:
    """A matmul of (tokens, k) with (k, n); `kept` elements of its input wait for backward unless another keeps them."""
    return Operator(
        name=name,
        kind="matmul",
        split=split,
        n=n,
        k=k,
        rows_per_token=rows,
        parameters=n * k + (n if bias else 0),
        kept_elements_per_token=kept,
    )


def lookup(name: str, rows: int, width: int, split: OperatorSplit) -> Operator:
    """A table of `rows` vectors, one of which every token reads."""
    return Operator(
        name=name,
        kind="gather",
        split=split,
        parameters=rows * width,
        elements_moved_per_token=2 * width,
        kept_bytes_per_token=_INDEX_BYTES,
    )
