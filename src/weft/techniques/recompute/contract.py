"""Recomputation: its settings, and which models it does not fit.

Source: Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174); selective: Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (arXiv 2205.05198).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, final

from weft.config.document import spell
from weft.config.settings import setting
from weft.techniques.contract import Case, Removal, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan

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


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, recompute="none"))


@final
class Recomputation(Technique):
    """Blocks that run their forward once more instead of keeping what backward needs."""

    name = "recomputation"
    part = RecomputeSettings
    removals = (Removal("recomputation", _without),)
    judged_alone = (RECOMPUTE_KEY,)

    def runs(self, plan: Plan) -> bool:
        return plan.memory.recomputes

    def check(self, case: Case) -> None:
        if case.facts.has_batch_norm and case.plan.memory.recomputes:
            problem = "would run BatchNorm's forward twice per step, and its running statistics would move twice."
            raise case.refuse(("memory", "recompute"), f'{problem}\nUse recompute = "none".')

    def check_model(self, case: Case) -> None:
        memory, blocks = case.plan.memory, case.facts.num_blocks
        path = ("memory", "recompute")
        if case.facts.no_stages and memory.recompute != "none":
            raise case.refuse(path, f'works block by block: {case.facts.no_stages}.\nUse "none".')
        if isinstance(memory.recompute, tuple) and blocks is not None and len(memory.recompute) != blocks:
            problem = f"has {len(memory.recompute)} words for {blocks} blocks.\nGive one word for all, or {blocks}."
            raise case.refuse(path, problem)

    def elsewhere(self, settings: RecomputeSettings) -> Iterator[str]:
        if settings.differs_by_block:
            yield "recomputation that differs from block to block"

    def lighter(self, settings: RecomputeSettings) -> Iterator[str]:
        for word in ("selective", "full"):
            if settings.recompute != word:
                yield f"recompute={word}"

    def unwritten(self, plan: Plan) -> Iterator[str]:
        recompute = plan.memory.recompute
        if recompute not in ("none", "full"):
            yield f'plan.memory.recompute = {spell(recompute)}: the script knows "none" and "full". Use one.'
