"""How the modules of an adapter split over the tensor axis: it follows from the layer beside which they stand.

Beside a layer that gives each rank some of its outputs, the pair's second matrix does so, too, from the whole narrow
activation between them.  Beside one that takes some of its inputs on each rank, the pair's first matrix does, and its
sum is the whole narrow activation.  The other matrix is whole, and its gradient on every rank.  DoRA's magnitudes are
divided as the layer's features are (`weft.techniques.tensor`).

Adapters of other methods have no such rule: the model with them is looked at as any other (`weft.analysis.blueprint`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from weft.config.recipe import Recipe
from weft.errors import RecipeError
from weft.model.adapters._layers import BASE, adapter_layers
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule, Tables


def split_beside(
    tables: Tables, layers: Collection[str], names: Collection[str], *, has_magnitudes: bool
) -> Sequence[SplitRule]:
    """Return the rules of a model whose `layers` have become modules with the layer and its LoRA pair inside.

    `names` are those of the modules before.  `has_magnitudes`: DoRA's stand beside the pairs.
    """
    rules: list[SplitRule] = []
    unnamed = set(names)
    for rule in tables.split:
        matching = {name for name in unnamed if fnmatchcase(name, rule.match)}
        unnamed -= matching
        inside = sorted(matching & set(layers))
        if inside and rule.divides:
            patterns = [rule.match] if len(inside) == len(matching) else inside
            rules += [each for pattern in patterns for each in _rules(pattern, rule, has_magnitudes=has_magnitudes)]
        rules.append(rule)
    return rules


def _rules(pattern: str, rule: SplitRule, *, has_magnitudes: bool) -> list[SplitRule]:
    base = replace(rule, match=f"{pattern}.{BASE}")
    around = SplitRule(match=pattern, kind="replicate")
    magnitudes = [replace(rule, match=f"{pattern}.lora_magnitude_vector.*")] if has_magnitudes else []
    if rule.kind == "column" and not (has_magnitudes and rule.gather_output):
        return [base, replace(rule, match=f"{pattern}.lora_B.*"), *magnitudes, around]
    if rule.kind == "row":
        narrow = SplitRule(match=f"{pattern}.lora_A.*", kind="row")
        return [base, narrow, SplitRule(match=f"{pattern}.lora_dropout.*", kind="features"), *magnitudes, around]
    # The norms of DoRA beside an embedding run over all its rows, and scale what an output gathered is made of.
    return [around] if has_magnitudes else [base, around]


def check_own_rules(tables: Tables, layers: Collection[str], method: str) -> None:
    """Refuse rules of the recipe that divide a layer whose adapter computes with whole weights.

    Raises:
        RecipeError: names the first rule and what to write instead.
    """
    for layer in layers:
        rule = tables.rule_of(layer)
        if rule is not None and rule.divides:
            raise RecipeError(
                f'model.split: "{rule.match}" = "{rule.kind}" divides {layer}, whose adapter (method ='
                f' "{method}") may compute with all of its weight. Leave the rule out, and those of the layers'
                " that it is split with: what may be divided is found by looking at the model."
            )


def unsplit_layers_note(blueprint: Blueprint, recipe: Recipe) -> list[str]:
    """Return a sentence about layers that tensor ranks hold whole because of their adapters; none
    where all are split."""
    adapter = recipe.model.adapter
    assert adapter is not None
    layers = adapter_layers(blueprint.module)
    whole = [layer for layer in layers if not _is_divided(blueprint, f"{layer}.{BASE}")]
    if not whole or not blueprint.splits:
        return []
    kinds = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in whole))
    return [
        f"{len(whole)} of {len(layers)} layers with adapters ({kinds}) stay whole on the tensor ranks: method ="
        f' "{adapter.method}" computes with all of their weights'
    ]


def _is_divided(blueprint: Blueprint, layer: str) -> bool:
    rule = blueprint.rule_of(layer)
    return rule is not None and rule.divides
