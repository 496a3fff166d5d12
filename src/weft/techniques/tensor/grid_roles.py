"""What each module of a model does on ranks that form a grid, and how its parameters are cut.

Looking at a model asks it, too, so nothing here needs other ranks.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from weft.errors import PlanError
from weft.models import Blueprint, SplitRule
from weft.techniques.tensor.grid_shape import GridCut
from weft.techniques.tensor.plain_layers import is_conv1d, is_linear

Kind = Literal["column", "row", "alone"]
"""What a product is: the first or the second one of a layer, or a layer by itself."""
Role = Literal["product", "vocabulary", "table", "norm", "heads", "alias"]
"""What a module does with features of which a rank has a part: multiplies them, looks them up in a table that is cut by
vocabulary, or in one that is not, normalises them, works on whole heads, or nothing, but that it holds vectors of other
modules by names of its own."""
_CLASSES = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms of transformers that scale by their weight and nothing else."""


def role_of(blueprint: Blueprint, name: str, module: nn.Module) -> Role | None:
    """Return what a module of the model does with features that are cut; None: what works feature by feature.

    Raises:
        PlanError: a module whose work on a part of the features nothing tells.
    """
    rule = blueprint.rule_of(name)
    kind = None if rule is None else rule.kind
    if kind == "heads":
        return "heads"
    if is_linear(module) or is_conv1d(module):
        if kind in (None, "column", "row", "sequence"):
            return "product"
    elif isinstance(module, nn.Embedding):
        if kind in (None, "vocab", "sequence"):
            return "vocabulary" if kind == "vocab" else "table"
    elif is_norm(module):
        if kind in (None, "sequence"):
            return "norm"
    elif next(module.parameters(recurse=False), None) is None and kind not in ("gather", "replicate", "expert"):
        return None
    elif kind is None and _holds_aliases(blueprint, name):
        return "alias"
    raise PlanError(
        f"plan.tensor_parallel.scheme cuts features between the layers, too, and nothing says how {name}, a"
        f" {type(module).__name__}{f' of the kind {chr(34)}{kind}{chr(34)}' if kind else ''}, works on a part of them."
        ' Use scheme = "1d".'
    )


def _holds_aliases(blueprint: Blueprint, name: str) -> bool:
    """Whether its own parameters are vectors, each cut as one of another module that it is."""
    module = blueprint.module.get_submodule(name)
    own = {f"{name}.{leaf}": each for leaf, each in module.named_parameters(recurse=False)}
    rules = [blueprint.rule_of_parameter(each) for each in own]
    is_cut = all(each.dim() == 1 for each in own.values()) and all(rule and rule.kind == "part" for rule in rules)
    if not own or not is_cut:
        return False
    others = blueprint.module.named_parameters(remove_duplicate=False)
    held = {id(each) for other, each in others if other not in own}
    return all(id(each) in held for each in own.values())


def kind_of_product(blueprint: Blueprint, name: str) -> Kind:
    """Return whether a product is the first or the second one of a layer, as the one-dimensional table has it."""
    kind = blueprint.kind_of(name)
    return kind if kind in ("column", "row") else "alone"


def grid_kind(
    blueprint: Blueprint, name: str, module: nn.Module
) -> Literal["product", "rms_norm", "layer_norm"] | None:
    """Return what ranks of a grid share of a module that no table lets one-dimensional ranks share."""
    try:
        role = role_of(blueprint, name, module)
    except PlanError:
        return None
    if role == "norm":
        return "layer_norm" if is_centred(module) else "rms_norm"
    return "product" if role == "product" else None


def cut_of(role: Role | None, module: nn.Module, leaf: str, rule: SplitRule | None) -> GridCut | None:
    """Return how a module's parameter is cut; None: every rank has all of it, and a part of its gradient."""
    blocks = 1 if rule is None else rule.blocks
    if role == "heads":
        return None
    if role == "table":
        return GridCut(1)
    if role == "alias":
        return GridCut(0, is_inside=True)
    is_product = role == "product"
    is_matrix = role == "vocabulary" or (is_product and leaf == "weight")
    is_inside = role == "vocabulary" or (is_product and (rule is None or rule.kind != "row"))
    return GridCut(1 if is_matrix and is_conv1d(module) else 0, blocks, is_matrix, is_inside)


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_norm(module: nn.Module) -> bool:
    """Whether this is a norm over the last dim, as `norm_forward` computes it."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__ in _CLASSES:
        return True
    return _kind_by_trial(module) is not None


def is_centred(module: nn.Module) -> bool:
    """Whether the norm subtracts the mean."""
    if isinstance(module, nn.LayerNorm):
        return True
    is_known = isinstance(module, nn.RMSNorm) or type(module).__name__ in _CLASSES
    return not is_known and _kind_by_trial(module) == "layer_norm"


def _kind_by_trial(module: nn.Module) -> Literal["rms_norm", "layer_norm"] | None:
    """What a trial shows of a module of another class."""
    if not type(module).__module__.startswith("transformers."):
        return None
    from weft.techniques.tensor.norm_trial import kind_by_trial  # ranks of few models need it

    return kind_by_trial(module)
