"""Which embedding tables of a model have sparse gradients; what is done with them, `sparse.py` says."""

from __future__ import annotations

import torch
from torch import nn

from weft.errors import RecipeError


def sparse_tables(module: nn.Module) -> dict[str, torch.Size]:
    """Return the trained tables with sparse gradients in a whole model: name → shape.

    Raises:
        RecipeError: such a table is also the weight of something else, whose gradient is dense.
    """
    owners: dict[int, list[tuple[str, nn.Module, nn.Parameter]]] = {}
    for module_name, inner in module.named_modules():
        for leaf, parameter in inner.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}" if module_name else leaf
            owners.setdefault(id(parameter), []).append((name, inner, parameter))
    tables: dict[str, torch.Size] = {}
    for uses in owners.values():
        name, _, parameter = uses[0]
        sparse = [_is_sparse(inner) for _, inner, _ in uses]
        if not parameter.requires_grad or not any(sparse):
            continue
        if len(uses) > 1:
            others = ", ".join(other for other, _, _ in uses[1:])
            raise RecipeError(
                f"{name} belongs to an embedding with sparse=True and is tied to {others}. The gradient of a"
                " tied weight is a sum in which all rows take part. Build the embedding with sparse=False, or"
                " leave the weights untied."
            )
        tables[name] = parameter.shape
    return tables


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
