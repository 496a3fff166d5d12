"""Settings of recomputation: a word for all blocks, or one per block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, Self

from weft.config.settings import setting

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_KEY = "memory.recompute"
"""The setting as a plan file spells it."""


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings:
    """The part of `memory` that is about what is computed again."""

    recompute: Recompute | tuple[Recompute, ...] = setting(
        "none", space="recomputes", narrows=("per_block_recompute",), asked=("recompute",), explained=True
    )
    """One word for all blocks, or one per block."""

    @property
    def recomputes(self) -> bool:
        """Whether some block is computed again."""
        return any(word != "none" for word in self.block_words)

    @property
    def recomputes_selectively(self) -> bool:
        """Whether every block computes again what is cheap for what it keeps."""
        return self.recompute == "selective"

    @property
    def recomputes_whole_blocks(self) -> bool:
        """Whether every block runs its whole forward again."""
        return self.recompute == "full"

    @property
    def differs_by_block(self) -> bool:
        """Whether there is a word per block, and not one for all."""
        return isinstance(self.recompute, tuple)

    @property
    def recompute_line(self) -> str:
        """Words for a line about a plan: `recompute full`, or `recompute full of 12 of 126 blocks` where blocks
        differ."""
        blocks = len(self.block_words)
        mixed = " and ".join(f"{word} of {count} of {blocks} blocks" for word, count in self._mixture())
        return f"recompute {mixed or self.block_words[0]}"

    @property
    def recompute_cell(self) -> str:
        """Words for a table: `full`, or `full 12/126`."""
        blocks = len(self.block_words)
        return " + ".join(f"{word} {count}/{blocks}" for word, count in self._mixture()) or self.block_words[0]

    def recomputing(self, words: Recompute | tuple[Recompute, ...]) -> Self:
        """Return the same with one word for all blocks, or one per block."""
        return replace(self, recompute=words)

    @property
    def block_words(self) -> tuple[Recompute, ...]:
        """A word per block, or the one word of all."""
        return self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)

    def _mixture(self) -> list[tuple[Recompute, int]]:
        """Words other than none, with how many blocks have each; empty where there is one word for all."""
        counts = Counter(self.block_words if self.differs_by_block else ())
        return [(word, counts[word]) for word in ("selective", "full") if counts[word]]
