"""One call of attention, beside its queries, keys and values, as ranks that share a sequence compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.model.attention.call import PLAIN, MaskPattern, ScoreMod
from weft.techniques.context.dropped import DroppedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Who sees whom in a sample, and what becomes of scores and probabilities, of this rank's heads."""

    pattern: MaskPattern
    mod: ScoreMod = PLAIN
    scale: float
    """Factor of the products of queries and keys."""
    dropped: DroppedAttention | None = None
    """The dropout of the probabilities, keyed over full samples; None: nothing is dropped."""

    def of_heads(self, start: int, heads: int) -> AttentionForm:
        """Return the same of some of the heads."""
        dropped = self.dropped
        if dropped is not None:
            dropped = replace(dropped, first_head=dropped.first_head + start)
        return replace(self, dropped=dropped, mod=self.mod.of_heads(start, heads))

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does it: no kernel drops by keys, knows windows, or does more to scores."""
        return self.dropped is None and self.pattern.window is None and self.mod.is_plain
