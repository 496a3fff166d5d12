"""What each module of a model does on ranks that form a grid, and how its parameters are cut.

A dry run asks it, too, so nothing here needs other ranks.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.plain_layers import is_conv1d, is_linear
from weft.techniques.tensor.mesh_2d.shape import GridCut, OnGrid

Kind = Literal["column", "row", "alone"]
"""The place of a product: the first or the second one of a layer, or a layer by itself."""
Role = Literal["product", "vocabulary", "table", "norm", "heads"]
"""What a module does with features of which a rank has a part: multiplies them, looks them up in a table that is cut by
vocabulary, or in one that is not, normalises them, or works on whole heads."""
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
            return "vocabulary" if kind == "vocab" or _is_tied(blueprint, name) else "table"
    elif is_norm(module):
        if kind in (None, "sequence", "gather"):  # statistics are those of the whole row, whatever lies between layers
            return "norm"
    elif next(module.parameters(recurse=False), None) is None and kind not in ("gather", "replicate", "expert"):
        return None
    raise PlanError(
        f"plan.tensor_parallel.scheme cuts features between the layers, too, and nothing says how {name}, a"
        f" {type(module).__name__}{f' of the kind {chr(34)}{kind}{chr(34)}' if kind else ''}, works on a part of them."
        ' Use scheme = "1d".'
    )


def _is_tied(blueprint: Blueprint, name: str) -> bool:
    """Whether a linear layer has the same weight: products are cut in both dims."""
    own = blueprint.module.get_submodule(name).weight
    return any(is_linear(module) and module.weight is own for module in blueprint.module.modules())


def kind_of_product(blueprint: Blueprint, name: str) -> Kind:
    """Return whether a product is the first or the second one of a layer, as the one-dimensional table has it."""
    kind = blueprint.kind_of(name)
    return kind if kind in ("column", "row") else "alone"


def grid_kind(blueprint: Blueprint, name: str, module: nn.Module) -> OnGrid | None:
    """Return what ranks of a grid do together in a module; None: nothing, or they form no grid for the model."""
    try:
        role = role_of(blueprint, name, module)
    except PlanError:
        return None
    if role == "norm":
        return "layer_norm" if is_centred(module) else "rms_norm"
    return {"product": "product", "vocabulary": "lookup"}.get(role or "")  # pyright: ignore[reportReturnType]


def cut_of(blueprint: Blueprint, role: Role | None, name: str, leaf: str) -> GridCut | None:
    """Return how a parameter of the module `name` is cut; None: every rank has all of it, and a part of its
    gradient."""
    module, rule = blueprint.module.get_submodule(name), blueprint.rule_of(name)
    blocks = 1 if rule is None else rule.blocks
    if role == "heads":
        return None
    if role == "table":
        return GridCut(1)
    is_product = role == "product"
    is_matrix = role == "vocabulary" or (is_product and leaf == "weight")
    is_inside = role == "vocabulary" or (is_product and (rule is None or rule.kind != "row"))
    return GridCut(1 if is_matrix and is_conv1d(module) else 0, blocks, is_matrix, is_inside)


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_norm(module: nn.Module) -> bool:
    """Whether this is a norm over the last dim, as `norm_forward` computes it."""
    own = type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)
    return own or type(module).__name__ in _CLASSES


def is_centred(module: nn.Module) -> bool:
    """Whether the norm subtracts the mean."""
    return type(module).forward is nn.LayerNorm.forward
