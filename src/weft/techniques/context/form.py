"""What one call of attention is, beside its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

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
    bias: Tensor | None = None
    """What is added to the scores, of whole samples and of this rank's heads, (heads or 1, queries or 1, keys or 1);
    None: nothing."""
    softcap: float | None = None
    """What scores s are bent by before anything is added: softcap · tanh(s / softcap); None: nothing."""
    sinks: Tensor | None = None
    """Scores of this rank's heads, (heads,), that take part in the softmax of every query and attend to nothing; None:
    there are none."""
    dropped: DroppedAttention | None = None
    """What is dropped of the probabilities, of whole samples; None: nothing."""

    def of_heads(self, start: int, heads: int) -> AttentionForm:
        """Return the same of some of the heads."""
        dropped, bias = self.dropped, self.bias
        if dropped is not None:
            dropped = replace(dropped, first_head=dropped.first_head + start)
        if bias is not None and bias.shape[0] > 1:
            bias = bias[start : start + heads]
        sinks = None if self.sinks is None else self.sinks[start : start + heads]
        return replace(self, dropped=dropped, bias=bias, sinks=sinks)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does it: no kernel drops by keys, knows windows, or does more to scores."""
        return all(each is None for each in (self.dropped, self.window, self.bias, self.softcap, self.sinks))
