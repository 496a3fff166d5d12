"""Recomputation: which models it does not fit.

Source: Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174); selective: Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique
from weft.techniques.recompute.settings import RECOMPUTE_KEY, RecomputeSettings


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, recompute="none"))


@final
class Recomputation(Technique):
    """Blocks that run their forward once more instead of keeping what backward needs."""

    name = "recomputation"
    part = RecomputeSettings
    ablations = (Ablation("recomputation", _without),)
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
        if (reason := case.facts.why_not("blocks")) and memory.recompute != "none":
            raise case.refuse(path, f'works block by block: {reason}.\nUse "none".')
        if isinstance(memory.recompute, tuple) and blocks is not None and len(memory.recompute) != blocks:
            problem = f"has {len(memory.recompute)} words for {blocks} blocks.\nGive one word for all, or {blocks}."
            raise case.refuse(path, problem)

    def unsupported_by_others(self, settings: RecomputeSettings) -> Iterator[str]:
        if settings.differs_by_block:
            yield "recomputation that differs from block to block"

    def lighter_settings(self, settings: RecomputeSettings) -> Iterator[str]:
        for word in ("selective", "full"):
            if settings.recompute != word:
                yield f"recompute={word}"

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        recompute = plan.memory.recompute
        if recompute not in ("none", "full"):
            yield f'plan.memory.recompute = {format_value(recompute)}: the script knows "none" and "full". Use one.'
