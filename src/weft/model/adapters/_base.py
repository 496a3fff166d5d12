"""Holds the frozen weights beside adapters in 8 or 4 bits (QLoRA)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init

from weft.config.recipe import BaseKind
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint, Initialiser
from weft.model.quantised import QuantisedLinear, block_of
from weft.model.stored import StoredTensor, stored_tensors


def quantise_base(blueprint: Blueprint, kind: BaseKind, tied: Collection[str]) -> None:
    """Replace a model's linear layers by quantised ones, in place: all but its head, and those whose weight another
    module shares.

    Their weights are read, or drawn, layer by layer, whole and in fp32, and only their codes are kept.

    Raises:
        RecipeError: there are none, or an odd number of inputs has no 4-bit form.
    """
    module: Any = blueprint.module
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    kept = {*tied, blueprint.vocabulary_head}
    layers = {
        name: child
        for name, child in blueprint.module.named_modules()
        if type(child) is nn.Linear and child is not head and name not in kept
    }
    if not layers:
        raise RecipeError(
            f'model.adapter.base = "{kind}": a {type(module).__name__} has no plain linear layers besides its head.'
            ' Use base = "plain".'
        )
    unpackable = next(
        (name for name, layer in layers.items() if kind == "nf4" and not block_of(layer.in_features)), None
    )
    if unpackable is not None:
        raise RecipeError(
            f'model.adapter.base = "nf4" packs pairs of weights, and {unpackable} has'
            f' {layers[unpackable].in_features} inputs. Use base = "int8".'
        )
    for name, layer in layers.items():
        quantised = QuantisedLinear(layer, kind)
        if blueprint.initialise is None:
            quantised.fill(layer.weight)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, quantised.train(layer.training))
    if blueprint.initialise is not None:
        blueprint.initialise = _QuantisedInitialiser(blueprint.initialise, layers)


class _QuantisedInitialiser:
    """Fills a model as before, and quantised layers with the codes of what they would have been."""

    def __init__(self, original: Initialiser, layers: Collection[str]) -> None:
        self._original, self._layers = original, frozenset(layers)
        self.stored: Mapping[str, StoredTensor] = {
            name: tensor
            for name, tensor in stored_tensors(original).items()
            if not (name.endswith(".weight") and name.removesuffix(".weight") in self._layers)
        }
        """See `weft.model.stored.stored_tensors`."""

    @torch.no_grad()
    def __call__(self, name: str, module: nn.Module) -> None:
        if name not in self._layers:
            self._original(name, module)
            return
        assert isinstance(module, QuantisedLinear)
        bias: Any = module.bias
        sizes = module.in_features, module.out_features
        plain: Any = skip_init(nn.Linear, *sizes, bias=bias is not None, dtype=torch.float32)
        self._original(name, plain)
        module.fill(plain.weight)
        if bias is not None:
            bias.data.copy_(plain.bias)
