"""What one call of attention is, beside its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from weft.techniques.context.dropped import DroppedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Who sees whom in a sample, and what becomes of the scores."""

    causal: bool
    """Whether a token sees none that stands behind it."""
    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """How many tokens each sees, itself and those before it; None: all of them.  Only where it is causal."""
    dropped: DroppedAttention | None = None
    """What is dropped of the probabilities, of whole samples; None: nothing."""
