"""How the modules of an adapter split over the tensor axis: it follows from the layer beside which they stand.

Beside a layer that gives each rank some of its outputs, the pair's second matrix does so, too, from the whole narrow
activation between them.  Beside one that takes some of its inputs on each rank, the pair's first matrix does, and its
sum is the whole narrow activation.  The other matrix is whole, and its gradient on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from weft.families import SplitRule, Tables


def split_beside(tables: Tables, layers: Collection[str], names: Collection[str]) -> Sequence[SplitRule]:
    """Return the rules of a model whose `layers` have become modules with the layer and its LoRA pair inside.

    `names` are those of the modules before.
    """
    rules: list[SplitRule] = []
    unnamed = set(names)
    for rule in tables.split:
        matching = {name for name in unnamed if fnmatchcase(name, rule.match)}
        unnamed -= matching
        inside = sorted(matching & set(layers))
        if inside and rule.divides:
            patterns = [rule.match] if len(inside) == len(matching) else inside
            rules += [each for pattern in patterns for each in _rules(pattern, rule)]
        rules.append(rule)
    return rules


def _rules(pattern: str, rule: SplitRule) -> list[SplitRule]:
    base = replace(rule, match=f"{pattern}.base_layer")
    around = SplitRule(match=pattern, kind="replicate")
    if rule.kind == "column":
        return [base, replace(rule, match=f"{pattern}.lora_B.*"), around]
    if rule.kind == "row":
        narrow = SplitRule(match=f"{pattern}.lora_A.*", kind="row")
        return [base, narrow, SplitRule(match=f"{pattern}.lora_dropout.*", kind="features"), around]
    return [base, around]
