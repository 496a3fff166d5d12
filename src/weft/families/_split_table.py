"""Split rules, asked by module name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.families._tables import SplitRule

INHERITED = ("sequence", "replicate", "heads", "features")
"""Kinds that also hold for what lies inside the matching module."""


@dataclass(frozen=True, slots=True)
class SplitTable:
    """The rules of a model."""

    rules: Sequence[SplitRule]

    def rule(self, name: str) -> SplitRule | None:
        """Return the first rule that matches, else that of the nearest enclosing module when it covers its inside."""
        for rule in self.rules:
            if fnmatchcase(name, rule.match):
                return rule
        while "." in name:
            name = name.rpartition(".")[0]
            for rule in self.rules:
                if fnmatchcase(name, rule.match):
                    return rule if rule.kind in INHERITED else None
        return None

    def kind(self, name: str) -> str | None:
        rule = self.rule(name)
        return None if rule is None else rule.kind
