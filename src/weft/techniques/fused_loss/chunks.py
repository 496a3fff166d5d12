"""How many tokens the fused loss takes at a time."""

from __future__ import annotations

_CHUNK_BYTES, _CHUNK_TOKENS = 8 << 20, (64, 1024)
"""Size of a chunk's logits in the softmax's precision, and bounds of a chunk, on the CPU: below, products lose their
speed; above, small vocabularies would gain nothing more."""
_ACCELERATOR_CHUNK_BYTES, _ACCELERATOR_CHUNK_TOKENS = 256 << 20, (512, 8192)
"""The same on accelerators, where products of few rows are bound by reading the head's weight and by launches.  By
reckoning, not by measurement: in bf16, 2,048 tokens do 2,048 operations per byte of weight that is read, and 64 do
64."""


def chunks_of(tokens: int, row_bytes: int, *, on_cores: bool) -> list[slice]:
    """Cut `tokens` into chunks; `row_bytes` are those of one token's logits in the softmax's precision."""
    low, high = _CHUNK_TOKENS if on_cores else _ACCELERATOR_CHUNK_TOKENS
    size = min(max((_CHUNK_BYTES if on_cores else _ACCELERATOR_CHUNK_BYTES) // row_bytes, low), high)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
