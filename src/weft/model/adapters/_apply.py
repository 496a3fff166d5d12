"""Adapters put into a blueprint's model, their initial weights, and what of it is exported.

`peft` puts an adapter around a module in place: `q_proj` becomes a module that holds the layer as `q_proj.base_layer`
and its own weights beside it.  The model stays the user's class, and the names of its blocks stay, so that stages, ZeRO
and recomputation need to know nothing.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.recipe import Recipe
from weft.errors import RecipeError
from weft.model.adapters._base import quantise_base
from weft.model.adapters._config import adapter_config, config_json, load_peft
from weft.model.adapters._layers import BASE, adapter_layers, check_single
from weft.model.adapters._splits import check_own_rules, split_beside
from weft.model.blueprint import Blueprint, Initialiser
from weft.model.families import SplitRule
from weft.model.seeding import seeded
from weft.model.stored import StoredTensor, stored_tensors

_ADAPTER = "default"
"""Name that `peft` gives to a model's only adapter; files leave it out."""


def apply_adapter(blueprint: Blueprint, recipe: Recipe) -> None:
    """Put the recipe's adapter into the blueprint's model, in place.

    The rules of layers beside which adapters stand become rules of these and their adapters.  With a method of which
    nobody can say beforehand how it splits, the model keeps no rules but the recipe's own.

    Raises:
        RecipeError: peft is absent, has no such method or setting, or finds no module for it.
    """
    adapter = recipe.model.adapter
    assert adapter is not None
    blueprint.has_known_forward = False
    config = adapter_config(adapter)
    names = [name for name, _ in blueprint.module.named_modules() if name]
    tied = _tied_modules(blueprint.module)
    if adapter.base != "plain":
        quantise_base(blueprint, adapter.base, tied)
    bare = copy.deepcopy(blueprint.module) if blueprint.initialise is not None else None
    _inject(config, blueprint.module, recipe, is_real=bare is None)
    layers = adapter_layers(blueprint.module)
    check_single(blueprint.module, layers, adapter.method)
    shared = sorted(tied & set(layers))
    if shared:
        raise RecipeError(
            f"model.adapter.targets has {shared[0]}, whose weight another module shares. Name other targets."
        )
    if bare is not None:
        assert blueprint.initialise is not None
        blueprint.initialise = _AdapterInitialiser(blueprint.initialise, bare, config, layers)
    if blueprint.vocabulary_head in layers:
        blueprint.split = [_gathered(rule, blueprint.vocabulary_head) for rule in blueprint.split]
        blueprint.vocabulary_head = None
    if adapter.divides:
        blueprint.split = split_beside(blueprint, layers, names, has_magnitudes=adapter.has_magnitudes)
    else:
        blueprint.split = list(blueprint.split)[: len(recipe.model.split)]
        blueprint.localise, blueprint.divisible = (), {}
        check_own_rules(blueprint, layers, adapter.method)
    blueprint.export = _exporter(blueprint.module)
    blueprint.export_config = config_json(config, recipe.model.hf or "", blueprint.task)
    blueprint.export_files = ("adapter_config.json", "adapter_model.safetensors")


def _tied_modules(module: nn.Module) -> set[str]:
    """Modules one of whose parameters is found elsewhere, too."""
    holders: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    return {name for several in holders.values() if len(several) > 1 for name in several}


def _inject(config: Any, module: nn.Module, recipe: Recipe, *, is_real: bool) -> None:
    """Let `peft` change the module; on the meta device nothing is drawn."""
    peft = load_peft()
    assert recipe.model.adapter is not None
    try:
        with warnings.catch_warnings(), seeded(recipe.run.seed):
            warnings.simplefilter("ignore")  # about settings that it corrects itself
            if is_real:
                peft.inject_adapter_in_model(config, module)
            else:
                with torch.device("meta"):
                    peft.inject_adapter_in_model(config, module, low_cpu_mem_usage=True)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as problem:
        if "meta" in str(problem):
            raise RecipeError(
                f"model.adapter: peft cannot put {recipe.model.adapter.method} into a model whose weights are not there"
                " yet, because it computes the adapters' sizes from numbers; Weft reads weights layer by layer. Use"
                " another method, such as lora."
            ) from problem
        raise RecipeError(
            f"model.adapter: peft cannot put {recipe.model.adapter.method} into a {type(module).__name__}"
            f" ({str(problem).rstrip('.')}). Name other model.adapter.targets, such as the ends of the names that"
            " `weft describe` shows."
        ) from problem
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RecipeError("model.adapter: nothing of it can be trained. Name other model.adapter.targets.")


class _AdapterInitialiser:
    """Fills a model's own modules as before, by their former names, and adapters as `peft` draws them.

    An adapter is drawn layer by layer: `peft` is given a model that has this layer alone.  Where its start depends on
    the layer's weights (DoRA's magnitudes), these are there.
    """

    def __init__(self, original: Initialiser, bare: nn.Module, config: Any, layers: Collection[str]) -> None:
        self._original, self._bare, self._config, self._layers = original, bare, config, frozenset(layers)
        self._reads_base = config.peft_type.value != "LORA" or config.use_dora
        former = stored_tensors(original)
        names = dict(bare.named_parameters(remove_duplicate=False)) | dict(bare.named_buffers(remove_duplicate=False))
        self.stored: Mapping[str, StoredTensor] = {self._moved(name): former[name] for name in names if name in former}
        """See `weft.model.stored.stored_tensors`."""

    def __call__(self, name: str, module: nn.Module) -> None:
        layer = self._layer_of(name)
        inside = name[len(layer) + 1 :] if layer is not None else ""
        if layer is None or inside.partition(".")[0] == BASE:
            self._original(name if layer is None else f"{layer}{inside[len(BASE) :]}", module)
            return
        drawn = self._drawn(layer)
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            path = f"{inside}.{leaf}" if inside else leaf
            tensor.data.copy_(_tensor(drawn, path))

    def _layer_of(self, name: str) -> str | None:
        """The module with an adapter that a name lies in, or is."""
        while name:
            if name in self._layers:
                return name
            name = name.rpartition(".")[0]
        return None

    def _moved(self, name: str) -> str:
        """Return the present name of a parameter or buffer of the bare model."""
        layer = self._layer_of(name)
        return name if layer is None else f"{layer}.{BASE}{name[len(layer) :]}"

    def _drawn(self, name: str) -> nn.Module:
        """The layer with its adapter, as `peft` makes them of the layer alone."""
        base = copy.deepcopy(self._bare.get_submodule(name)).to_empty(device="cpu")
        base.to(torch.float32)
        if self._reads_base:
            for inner, module in base.named_modules():
                self._original(f"{name}.{inner}" if inner else name, module)
        parent, _, leaf = name.rpartition(".")
        tree = nn.Module()
        at = tree
        for part in parent.split(".") if parent else []:
            child = nn.Module()
            at.add_module(part, child)
            at = child
        at.add_module(leaf, base)
        config = copy.deepcopy(self._config)
        config.target_modules = {name}
        for setting in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            if hasattr(config, setting):
                setattr(config, setting, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_peft().inject_adapter_in_model(config, tree)
        return tree.get_submodule(name)


def _tensor(module: nn.Module, path: str) -> Tensor:
    owner, _, leaf = path.rpartition(".")
    tensor = getattr(module.get_submodule(owner), leaf)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _gathered(rule: SplitRule, head: str | None) -> SplitRule:
    """The head's own rule, so that its output is whole: only a bare linear layer is fused with the loss."""
    return replace(rule, gather_output=True) if rule.match == head and rule.kind == "column" else rule


def _exporter(module: nn.Module) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return a function from all weights to those of the adapter, under the names that `PeftModel.from_pretrained`
    reads."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def export(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = importlib.import_module("peft").get_peft_model_state_dict(
            module, state_dict={name: weights[name] for name in trained}, save_embedding_layers=False
        )
        return {f"base_model.model.{name}": tensor for name, tensor in saved.items()}

    return export
