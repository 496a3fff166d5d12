"""Whether a split table that was written by hand is one that the model's forwards allow.

The layers that the table splits are proposed as `propose_split` would, these and no others, columns as columns and rows
as rows; what comes of it must be the table.  So a softmax over channels, features that change places between a pair, a
norm that no rule covers and a layer that reads parts without a rule are seen before a number is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from weft.analysis.tensor_split._dropped import is_dropout
from weft.analysis.tensor_split.proposal import Proposal
from weft.analysis.tensor_split.propose import propose_split
from weft.config.recipe import SplitKind
from weft.model.blueprint import Blueprint
from weft.model.channels import is_convolution
from weft.model.families import SplitRule
from weft.model.localising import numbers_of
from weft.model.meta_forward import glob_of

_COLUMNS: tuple[SplitKind, ...] = ("column", "channel_out")
_ROWS: tuple[SplitKind, ...] = ("row", "channel_in")
_COMPARED: tuple[SplitKind, ...] = (*_COLUMNS, *_ROWS, "channels", "heads", "features", "part", "gather")
_Rules = Mapping[str, SplitRule]


def try_table(blueprint: Blueprint) -> None:
    """See whether a model may be split by its table, where that was written by hand and divides channels.

    Enters into the blueprint why it may not be (the limit `tensor`), or in a note that its forwards could not be
    followed.  Every process finds the same, for the analysis depends on the model alone.
    """
    if not any(rule.kind in ("channel_out", "channel_in", "channels") for rule in blueprint.split):
        return
    try:
        problem = table_problem(blueprint)
    except Exception as error:  # a forward may do what no rule of the analysis foresaw
        said = next(iter(str(error).splitlines()), "").rstrip(".")
        note = (
            f"whether the split table of {type(blueprint.module).__name__} fits its forward could not be tried"
            f" ({said}): run `weft check` before you rely on a tensor axis"
        )
        blueprint.notes = (*blueprint.notes, note)
        return
    if problem:
        blueprint.limit("tensor", f"its split table does not fit what its forward computes: {problem}")


def table_problem(blueprint: Blueprint) -> str:
    """Return what a model's forwards have against its table: a sentence without its end; empty: nothing.

    Raises:
        RecipeError: they cannot be followed (see `propose_split`).
    """
    mine = _dividing(blueprint, blueprint)
    columns, rows = (frozenset(name for name, rule in mine.items() if rule.kind in side) for side in (_COLUMNS, _ROWS))
    layers = [
        name for name, module in blueprint.module.named_modules() if isinstance(module, nn.Linear) or _is_layer(module)
    ]
    others = [SplitRule(match=name, kind="replicate") for name in layers if name not in columns | rows]
    bare = replace(blueprint, split=others, localise=(), divisible={}, vocabulary_head=None, vocabulary_size=None)
    proposal = propose_split(bare, only=(columns, rows))
    theirs = _dividing(replace(bare, split=[proposed.rule for proposed in proposal.rules]), blueprint)
    return _difference(mine, theirs, proposal) or _uncounted(blueprint, proposal)


def _is_layer(module: nn.Module) -> bool:
    return is_convolution(module) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _dividing(tables: Blueprint, blueprint: Blueprint) -> dict[str, SplitRule]:
    """Rules that let modules work on parts, by name; those of modules on which they have no effect are left out."""
    rules: dict[str, SplitRule] = {}
    for name, module in blueprint.module.named_modules(remove_duplicate=False):
        rule = tables.rule_of(name) if name else None
        has_tensors = any(True for _ in module.parameters(recurse=False)) or is_dropout(module)
        is_whole = rule is None or rule.gather_output or name == blueprint.vocabulary_head
        if rule is not None and not is_whole and rule.kind in _COMPARED and (has_tensors or rule.kind == "channels"):
            rules[name] = rule
        for leaf, _ in module.named_parameters(recurse=False):
            own = tables.rule_of_parameter(f"{name}.{leaf}")
            if own is not None:
                rules[f"{name}.{leaf}"] = own
    return rules


def _difference(mine: _Rules, theirs: _Rules, proposal: Proposal) -> str:
    reasons = dict(proposal.replicated)
    makers_first = sorted(mine, key=lambda name: mine[name].kind not in _COLUMNS)
    for name in makers_first:
        rule, other = mine[name], theirs.get(name)
        if other is None:
            reason = reasons.get(glob_of(name)) if rule.kind in _COLUMNS else None
            return f'{name} cannot be "{rule.kind}": {reason or "what it would take in parts is not split"}'
        if other.blocks != rule.blocks:
            return (
                f"what is split lies in {other.blocks} blocks in {name}, and a rank needs its part of each of them,"
                f" where the rule cuts {f'{rule.blocks} blocks' if rule.blocks > 1 else 'all of it'} into runs"
            )
        if (other.kind, other.dim) != (rule.kind, rule.dim):
            return f'{name} would have to be "{other.kind}" and not "{rule.kind}"'
    for name, rule in theirs.items():
        if name not in mine:
            return f'{name} works on parts of what is split, and no rule says so: it would have to be "{rule.kind}"'
    return ""


def _uncounted(blueprint: Blueprint, proposal: Proposal) -> str:
    """An attribute that counts what is split, and that nothing divides."""
    for entry in proposal.localise:
        for name, module in blueprint.module.named_modules():
            has = fnmatchcase(name, entry.match) and entry.attribute in dict(numbers_of(module))
            known = any(fnmatchcase(name, e.match) and e.attribute == entry.attribute for e in blueprint.localise)
            if has and not known:
                return f"{name or 'the model'} counts by its attribute {entry.attribute} what is split"
    return ""
