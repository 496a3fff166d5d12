"""The proposal of a graph analysis: how each module splits over the tensor axis, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.model.blueprint import Blueprint
from weft.model.families import Localise, SplitRule

Confidence = Literal["high", "medium"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedRule:
    """A split rule and the reason for it."""

    rule: SplitRule
    reason: str
    confidence: Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A split table that nobody has proven yet: compare gradients with one process (`weft check`) before relying on it.

    Empty where the analysis finds nothing: the model then gets data and ZeRO plans only.
    """

    rules: tuple[ProposedRule, ...] = ()
    localise: tuple[Localise, ...] = ()
    divisible: Mapping[str, int]
    vocabulary_head: str | None = None
    replicated: tuple[tuple[str, str], ...] = ()
    """Modules that every rank keeps whole, and why."""
    notes: tuple[str, ...] = ()

    @property
    def splits(self) -> bool:
        """Whether it lets the tensor axis divide anything."""
        return any(proposed.rule.divides for proposed in self.rules)

    def apply_to(self, blueprint: Blueprint) -> None:
        """Give the blueprint this table, behind the rules that it has."""
        blueprint.split = (*blueprint.split, *(proposed.rule for proposed in self.rules))
        blueprint.localise = (*blueprint.localise, *self.localise)
        blueprint.divisible = {**self.divisible, **blueprint.divisible}
        if blueprint.vocabulary_head is None:
            blueprint.vocabulary_head = self.vocabulary_head


def lines_of(proposal: Proposal) -> list[str]:
    """The proposal as text: the table first, then what stays whole."""
    if not proposal.splits:
        lines = ["# Nothing of this model can be split over the tensor axis: it gets data and ZeRO plans only."]
    else:
        lines = ["[model.split]"]
        width = max(len(proposed.rule.match) for proposed in proposal.rules) + 2
        for proposed in proposal.rules:
            rule, name = proposed.rule, f'"{proposed.rule.match}"'
            lines.append(f'{name:<{width}} = "{rule.kind}"  # {_extras(rule)}{proposed.reason} ({proposed.confidence})')
        lines += _beyond(proposal)
    lines += [f"# whole on every rank: {name}: {reason}" for name, reason in proposal.replicated]
    return lines + [f"# {note}" for note in proposal.notes]


def _extras(rule: SplitRule) -> str:
    blocks = f"blocks={rule.blocks}; " if rule.blocks > 1 else ""
    return blocks + ("gather_output; " if rule.gather_output else "")


def _beyond(proposal: Proposal) -> list[str]:
    """Return the settings that a recipe's table cannot express."""
    lines = [f"# the tensor axis must divide {name} = {size}" for name, size in proposal.divisible.items()]
    lines += [f"# {entry.match or 'the model'}: {entry.attribute} is divided too" for entry in proposal.localise]
    if proposal.vocabulary_head is not None:
        lines.append(f"# {proposal.vocabulary_head} is the vocabulary head, read by the loss alone")
    fused = any(p.rule.blocks > 1 or p.rule.gather_output for p in proposal.rules)
    if fused or proposal.localise or proposal.vocabulary_head:
        lines.append("# [model.split] alone cannot say all that: write propose_split = true under [model] instead.")
    return lines
